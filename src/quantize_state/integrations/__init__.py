"""Other toolkits that quantise, and how a state's policy fits beside them. Each module needs its toolkit installed."""

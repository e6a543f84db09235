"""Other people's toolkits and engines, and how a state's policy fits in. Each module needs its toolkit installed."""

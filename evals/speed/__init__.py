"""How fast: the kernels' bench with its byte model, results and tables, and the scan against stepping."""

"""`vlp` (launch.cli) and the scripts that launchers run by their path."""

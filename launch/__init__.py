"""`vlp` (launch.commands) and the scripts that launchers run by their path."""

"""`vlp` (launch.training_commands) and the scripts that launchers run by their path."""

"""Commands that start everything: `vlp` (launch.cli) and the scripts that launchers run by path."""

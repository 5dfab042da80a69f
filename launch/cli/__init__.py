"""The command-line interface: `vlp` (`launch.cli.main`) and its commands."""

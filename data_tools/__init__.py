"""Raw data sets to shards, their index and their vocabulary: `python -m data_tools`."""

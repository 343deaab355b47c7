"""A small decoder language model, written once; strategy files decide its sharding."""

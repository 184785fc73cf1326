"""The command line: parse, build a configuration, call a room, print. Results go to stdout, the rest to stderr."""

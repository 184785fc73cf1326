"""The command line: parse, build a configuration, call a room, print. Results go to stdout, everything else to stderr."""

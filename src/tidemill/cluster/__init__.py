"""Placement of engines, trainers and sandbox nodes on many machines (Ray). One machine needs nothing from here, and there is
nothing here yet."""

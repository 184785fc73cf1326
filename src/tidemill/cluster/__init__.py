"""Placement of engines, trainers and sandbox nodes on many machines. One machine needs nothing from here."""

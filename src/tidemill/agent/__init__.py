"""The harness: tasks, tools, sandboxes lent to episodes, multi-turn episodes over engine sessions, grading, evaluation.

Sees engine and sandbox only through the client protocols of tidemill.core.
"""

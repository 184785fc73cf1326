"""What runs inside a sandbox: the agent (static C, first process), the interpreter zygote, and the frames
they are spoken to in."""

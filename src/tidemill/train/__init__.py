"""Training: supervised warm-up, reinforcement learning on LoRA adapters, and the proof that the engine serves what was
trained. Engines and sandboxes are reached through core's client protocols; processes are started by core's launcher."""

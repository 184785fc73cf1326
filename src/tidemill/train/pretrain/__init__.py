"""Pretraining and supervised fine-tuning on local data: documents in, a model folder out."""

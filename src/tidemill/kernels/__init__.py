"""One folder per operation: tensors in, tensors out. Knows no model, request or configuration object.

Two families live side by side (docs/numerics.md): *row-invariant* forms that the engine uses in every phase, and
*training* forms (chunked KDA, expanded MLA) that autograd and matmul speed prefer.
"""

"""Runs in the oracle environment: llama.cpp on one GGUF file, through the bindings of llama-cpp-python.

    llamacpp.py logits MODEL IDS.npy OUT.npy CHUNK     logits fp32 [T, V] of ids int32 [T], CHUNK tokens a call
    llamacpp.py tokens MODEL TEXTS.json OUT.json       ids of each {"text", "special"}

F32 cache, flash attention off, one thread. The library is the one in LLAMA_CPP_LIB_PATH.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp as lc
import numpy as np

_FLASH_ATTENTION_OFF = 0


@lc.llama_log_callback
def _errors_only(level, text, _):
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


def open_model(path, *, vocab_only=False):
    lc.llama_log_set(_errors_only, ctypes.c_void_p(0))
    lc.llama_backend_init()
    params = lc.llama_model_default_params()
    params.n_gpu_layers, params.use_mmap, params.vocab_only = 0, True, vocab_only
    model = lc.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        sys.exit(f"llama.cpp refused {path}")
    return model


def logits(path, ids, chunk):
    model = open_model(path)
    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = len(ids) + 8, chunk, chunk, 1
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0
    params.flash_attn_type = _FLASH_ATTENTION_OFF
    ctx = lc.llama_init_from_model(model, params)
    if not ctx:
        sys.exit("llama.cpp made no context")
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    out = np.empty((len(ids), vocab), np.float32)
    batch = lc.llama_batch_init(chunk, 0, 1)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), start + i, 1, 1
            batch.seq_id[i][0] = 0
        if lc.llama_decode(ctx, batch):
            sys.exit(f"llama_decode failed at token {start}")
        raw = ctypes.cast(lc.llama_get_logits(ctx), ctypes.POINTER(ctypes.c_float * (len(part) * vocab)))
        out[start : start + len(part)] = np.frombuffer(raw.contents, np.float32).reshape(len(part), vocab)
    lc.llama_batch_free(batch)
    lc.llama_free(ctx)
    lc.llama_model_free(model)
    return out


def tokens(path, rows):
    model = open_model(path, vocab_only=True)
    vocab = lc.llama_model_get_vocab(model)
    found = []
    for row in rows:
        raw = row["text"].encode()
        room = len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        n = lc.llama_tokenize(vocab, raw, len(raw), ids, room, False, row["special"])
        found.append(list(ids[:n]))
    return found


if __name__ == "__main__":
    task, model_path, source, target = sys.argv[1:5]
    if task == "logits":
        np.save(target, logits(model_path, np.load(source), int(sys.argv[5])))
    else:
        Path(target).write_text(json.dumps(tokens(model_path, json.loads(Path(source).read_text()))))

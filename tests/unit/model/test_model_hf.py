"""Hugging Face's Auto classes on our model folders: loading, forward, cache, generation, saving, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tidemill.core.config import replace
from tidemill.core.errors import ConfigError, InputError, IntegrityError
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import ChatCodec, ChatOptions, build_tokenizer, parse_messages
from tidemill.model.config import ModelConfig
from tidemill.model.convert import Wanted, convert
from tidemill.model.hf import HybridCache, K3Config, K3ForCausalLM, KimiLinearForCausalLM, TidemillTokenizer
from tidemill.model.presets import tiny_linear, toy

FAMILIES = ("k3", "linear")
CALL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers copies a folder's modules to a cache; not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE",
                      str(tmp_path_factory.mktemp("modules")))
        yield


def written(folder: Path, family: str) -> Path:
    tokenizer = build_tokenizer()
    config = toy(tokenizer.size) if family == "k3" else replace(
        tiny_linear(), text_config=replace(tiny_linear().text_config, vocab_size=tokenizer.size))
    model = CausalLM(config.with_control(tokenizer.control), seed=3)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("res_proj.weight"):
                x.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    write_base(folder, model)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("hf") / request.param, request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> CausalLM:
    return BaseStore.open(folder).model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def ids_of(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 250, (n,), generator=generator) for n in lengths]


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    width = max(map(len, rows))
    at = (lambda n: (width - n, 0)) if side == "left" else (lambda n: (0, width - n))
    return {"input_ids": torch.stack([F.pad(r, at(len(r)), value=9) for r in rows]),
            "attention_mask": torch.stack([F.pad(torch.ones_like(r), at(len(r))) for r in rows])}


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() <= 2e-5 * want.norm())


def test_auto_classes_find_the_package(folder: Path, model: Any, tokenizer: Any, reference: CausalLM) -> None:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.model_config == reference.config
    assert config.hidden_size == reference.config.text_config.hidden_size
    assert isinstance(model, K3ForCausalLM if config.model_type == "kimi_k3" else KimiLinearForCausalLM)
    assert isinstance(tokenizer, TidemillTokenizer)
    assert not model.training
    assert isinstance(model.model.layers[0].self_attn.o_proj, torch.nn.Linear)  # what PEFT looks for
    (ids,) = ids_of(40)
    with torch.no_grad():
        assert torch.equal(model(ids.unsqueeze(0)).logits, reference(ids.unsqueeze(0)))
    assert dict(model.state_dict()).keys() == dict(reference.state_dict()).keys()


def test_a_fresh_model_is_drawn_with_torchs_generator(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(AutoModelForCausalLM.from_config(config, trust_remote_code=True).lm_head.weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_digest_of_a_configuration_knows_nothing_of_the_auto_classes(folder: Path) -> None:
    config = ModelConfig.read(folder)
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config.to_json()
    assert ModelConfig.from_json(config.to_json()).digest == config.digest


def test_fields_can_be_changed_and_are_checked(tmp_path: Path) -> None:
    config = K3Config.wrap(toy(96))
    config.num_experts_per_token = 3
    assert config.model_config.text_config.num_experts_per_token == 3
    assert ModelConfig.from_json(config.to_dict()).text_config.num_experts_per_token == 3
    config.num_experts_per_token = 0
    with pytest.raises(ConfigError, match="num_experts_per_token"):
        config.to_dict()
    config.num_experts_per_token = 2
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, trust_remote_code=True).model_config == config.model_config
    with pytest.raises(ConfigError, match="hidden_size"):
        K3Config(**{"text_config": {"hidden_size": "wide"}})


# -- forward -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_changes_nothing(model: Any, reference: CausalLM, side: str, use_cache: bool) -> None:
    rows = ids_of(31, 70, 12)
    with torch.no_grad():
        logits = model(**padded(rows, side), use_cache=use_cache).logits
        for got, row in zip(logits, rows, strict=True):
            mine = got[-len(row) :] if side == "left" else got[: len(row)]
            assert close(mine, reference(row.unsqueeze(0))[0])
            assert int((got == 0).all(-1).sum()) == got.shape[0] - len(row)


def test_masked_tokens_in_the_middle_do_not_exist(model: Any, reference: CausalLM) -> None:
    (row,) = ids_of(20)
    mask = torch.ones(1, 20)
    mask[0, 5:9] = 0
    with torch.no_grad():
        got = model(row.unsqueeze(0), attention_mask=mask).logits[0][mask[0].bool()]
        assert close(got, reference(row[mask[0].bool()].unsqueeze(0))[0])


def test_positions_that_begin_again_part_documents(model: Any, reference: CausalLM) -> None:
    rows = ids_of(17, 30)
    positions = torch.cat([torch.arange(len(r)) for r in rows]).unsqueeze(0)
    with torch.no_grad():
        got = model(torch.cat(rows).unsqueeze(0), position_ids=positions, use_cache=False).logits[0]
        for part, row in zip(got.split([17, 30]), rows, strict=True):
            assert close(part, reference(row.unsqueeze(0))[0])


def test_loss_gradients_and_recomputation(model: Any) -> None:
    batch = padded(ids_of(12, 25), "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    parameter = model.model.layers[1].self_attn.o_proj.weight
    grads = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        output = model(**batch, labels=labels)
        assert output.past_key_values is None
        grads.append(torch.autograd.grad(output.loss, parameter)[0])
    assert model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert torch.equal(*grads)
    assert bool(grads[0].any())
    want = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, want)
    shared = model(**batch, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(shared, want * int((labels[:, 1:] != -100).sum()) / 7)


def test_chosen_columns(model: Any) -> None:
    batch = padded(ids_of(12, 25), "left")
    with torch.no_grad():
        whole = model(**batch).logits
        assert close(model(**batch, logits_to_keep=2).logits, whole[:, -2:])
        columns = torch.tensor([3, 20])
        assert close(model(**batch, logits_to_keep=columns, use_cache=False).logits, whole[:, columns])
        assert model(**batch, return_dict=False)[0].shape == whole.shape


# -- generation --------------------------------------------------------------------------------------------------------


def greedy(reference: CausalLM, row: Tensor, count: int) -> list[int]:
    out = row
    with torch.no_grad():
        for _ in range(count):
            out = torch.cat([out, reference(out.unsqueeze(0))[0, -1:].argmax(-1)])
    return out[len(row) :].tolist()


def test_generate_with_and_without_a_cache(model: Any, reference: CausalLM) -> None:
    rows = ids_of(9, 70, 30)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 9}
    for extra in ({}, {"use_cache": False}):
        out = model.generate(**padded(rows, "left"), **settings, **extra)[:, -6:]
        assert out.tolist() == [greedy(reference, row, 6) for row in rows]


def test_generate_by_beams_with_and_without_a_cache(model: Any) -> None:
    batch = padded(ids_of(9, 21), "left")
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "eos_token_id": None,
                                "pad_token_id": 9, "num_return_sequences": 2}
    assert torch.equal(model.generate(**batch, **settings), model.generate(**batch, **settings, use_cache=False))


def test_a_cache_is_kept_between_calls(model: Any, reference: CausalLM) -> None:
    (row,) = ids_of(40)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 9,
                                "return_dict_in_generate": True}
    first = model.generate(row[:30].unsqueeze(0), **settings)
    cache = first.past_key_values
    assert isinstance(cache, HybridCache)
    assert cache.get_seq_length() == 33
    longer = torch.cat([first.sequences[0], row[30:]])
    second = model.generate(longer.unsqueeze(0), past_key_values=cache, **settings)
    assert second.sequences[0, -4:].tolist() == greedy(reference, longer, 4)
    assert cache.get_seq_length() == len(longer) + 3
    cache.reset()
    assert cache.get_seq_length() == 0


def test_prefill_in_chunks_that_are_padding_only(model: Any, reference: CausalLM) -> None:
    rows = ids_of(5, 40)
    out = model.generate(**padded(rows, "left"), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=9,
                         past_key_values=HybridCache(reference.config.text_config), prefill_chunk_size=16)
    assert out[:, -3:].tolist() == [greedy(reference, row, 3) for row in rows]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_saving_writes_the_same_base_again(folder: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    assert BaseStore.open(tmp_path / "again").digest == BaseStore.open(folder).digest
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    words = AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert isinstance(words, TidemillTokenizer)
    assert not {p.name for p in (tmp_path / "again").iterdir()} & {"tokenization.py", "modeling.py"}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_dtype_may_be_chosen(folder: Path, model: Any, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    (row,) = ids_of(20)
    with torch.no_grad():
        got, want = half(row.unsqueeze(0)).logits.float(), model(row.unsqueeze(0)).logits
    assert (got - want).norm() < 0.1 * want.norm()
    half.save_pretrained(tmp_path / "half")
    assert ModelConfig.read(tmp_path / "half").text_config.dtype == "bfloat16"
    with pytest.raises(InputError, match="dtype = 'float16'"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="float16")


def test_converted_folders_name_our_tokenizer(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_base(source, BaseStore.open(folder).model())
    build_tokenizer().save(source)
    data = json.loads((source / "tokenizer_config.json").read_text())
    foreign = data | {"auto_map": {"AutoTokenizer": ["tokenization_elsewhere.Words", None]}, "tokenizer_class": "Words"}
    (source / "tokenizer_config.json").write_text(json.dumps(foreign))
    convert(source, tmp_path / "target", Wanted(experts="f32", layout="stacked"))
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path / "target", trust_remote_code=True), TidemillTokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "target", trust_remote_code=True)
    want = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize(("change", "message"), [
    ({"device_map": {"": 0}}, "device_map = {'': 0}"), ({"load_in_4bit": True}, "load_in_4bit"),
    ({"num_experts": 3}, "num_experts|differs"),
])
def test_what_cannot_be_had_on_loading_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **change)


def test_a_damaged_folder_is_refused_with_the_tensor(folder: Path, tmp_path: Path) -> None:
    broken = written(tmp_path / "broken", "k3")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(broken, trust_remote_code=True)


def test_what_a_forward_pass_cannot_do_is_refused(model: Any) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    dynamic = transformers.DynamicCache()
    for arguments, field in (
        ({"input_ids": None}, "input_ids"), ({"inputs_embeds": torch.zeros(1)}, "inputs_embeds"),
        ({"output_hidden_states": True}, "output_hidden_states"), ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask"), ({"past_key_values": dynamic}, "past_key_values"),
        ({"use_cache": True}, "use_cache"),
    ):
        with pytest.raises(InputError) as e:
            model(**({"input_ids": ids} | arguments))
        assert e.value.field == field
    with torch.no_grad():
        cache = model(ids).past_key_values
        with pytest.raises(InputError, match="holds 2 sequences, input_ids 1"):
            model(ids[:1], past_key_values=cache)
    for refused in (lambda: cache.crop(1), lambda: cache.update(ids, ids, 0),
                    lambda: model.generate(ids, cache_implementation="static", max_new_tokens=1),
                    lambda: model.set_input_embeddings(None), lambda: model.save_pretrained("x", push_to_hub=True),
                    lambda: model.save_pretrained("x", max_shard_size="5GB")):
        with pytest.raises(InputError):
            refused()


# -- tokenizer ---------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add 1 and 2"},
        {"role": "assistant", "content": "", "reasoning_content": "use the tool",
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"}]


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_prompts_are_those_of_the_codec(folder: Path, tokenizer: Any, thinking: bool) -> None:
    codec = ChatCodec(build_tokenizer())
    want = codec.prompt_ids(parse_messages(CHAT), ChatOptions(thinking=thinking, tools=(CALL,)))
    got = tokenizer.apply_chat_template(CHAT, tools=[CALL], add_generation_prompt=True, enable_thinking=thinking)
    assert got["input_ids"] == want
    assert got["attention_mask"] == [1] * len(want)
    text = tokenizer.apply_chat_template(CHAT, tools=[CALL], add_generation_prompt=True, enable_thinking=thinking,
                                         tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == want
    assert tokenizer.decode(want) == text


def test_a_message_that_spells_a_marker_stays_text(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "<|close|>message<|sep|><|end_of_msg|>"}]
    plain = [{"role": "user", "content": "x"}]
    ids, ordinary = (tokenizer.apply_chat_template(c, return_dict=False) for c in (chat, plain))
    control = set(build_tokenizer().control_names)
    assert [i for i in ids if i in control] == [i for i in ordinary if i in control]
    assert tokenizer.decode(ids).count("<|end_of_msg|>") == 2


def test_batches_of_chats(tokenizer: Any) -> None:
    chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "a longer message"}]]
    got = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt")
    alone = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    for row, mask, want in zip(got["input_ids"], got["attention_mask"], alone, strict=True):
        assert row[mask.bool()].tolist() == want
        assert mask.tolist() == sorted(mask.tolist())
    assert len(tokenizer.apply_chat_template(chats[1], truncation=True, max_length=5, return_dict=False)) == 5


def test_functions_become_tools(tokenizer: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    ids = tokenizer.apply_chat_template(CHAT[:2], tools=[add], return_dict=False)
    assert '"name":"add"' in tokenizer.decode(ids)


@pytest.mark.parametrize(("extra", "field"), [
    ({"continue_final_message": True}, "continue_final_message"), ({"documents": [{}]}, "documents"),
    ({"return_assistant_tokens_mask": True}, "return_assistant_tokens_mask"),
    ({"enable_thought": True}, "enable_thought"), ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
])
def test_what_the_grammar_cannot_say_is_refused(tokenizer: Any, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as e:
        tokenizer.apply_chat_template(CHAT[:2], **extra)
    assert e.value.field == field

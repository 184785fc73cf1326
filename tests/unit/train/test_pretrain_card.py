"""A card is written from files; a model of the package is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.cli.model_source import model_folder
from tidemill.core.errors import InputError
from tidemill.core.files import write_json
from tidemill.model import shipped
from tidemill.model.presets import nano
from tidemill.model.shipped import shipped_model, shipped_names
from tidemill.train.pretrain.card import write_card

SHARE = {"point": 0.5, "lo95": 0.4, "hi95": 0.6, "n": 90}


def test_every_figure_of_a_card_comes_from_a_file(tmp_path: Path) -> None:
    nano().write(tmp_path)
    write_json(tmp_path / "data.json", {"sources": {
        "python": {"weight": 3.0, "licence": "PSF-2.0", "package": "Python", "digest": "sha256:0123456789abcdef"},
        "toolbox": {"weight": 1.0, "licence": "generated", "package": "", "task": "toolbox"}}})
    write_json(tmp_path / "training.json", {"recipe": "nano", "kind": "pretrain", "parameters": 4_633_856,
                                            "tokens": 1_234_567, "steps": 321, "seed": 7})
    bits = {"model": {"point": 1.9, "lo95": 1.8, "hi95": 2.0}, "ngram": {"point": 2.1, "lo95": 2.05, "hi95": 2.2},
            "order": 6, "documents": 12, "bytes": 34_567}
    skill = {"skill": "calls", "n": 90, "sampled": SHARE, "greedy": SHARE | {"point": 1.0}}
    write_json(tmp_path / "measured.json",
               {"when": "2026-01-01", "commit": "abc1234", "bits_per_byte": bits, "skills": [skill]})
    text = write_card(tmp_path).read_text()
    assert text.startswith("---\nlicense: other\n")
    for part in ("4,633,856 parameters", "1,234,567 tokens", "321 steps, seed 7", "no general assistant",
                 "| python | 75% | PSF-2.0 | Python | sha256:0123456789ab |",
                 "| toolbox | 25% | generated | task toolbox | generated |",
                 "**1.900 [1.800, 2.000] bits per byte**", "2.100 [2.050, 2.200]", "order 6", "34,567 bytes",
                 "| calls | 50.0% [40.0%, 60.0%] | 100.0% [40.0%, 60.0%] | 90 |", "commit abc1234"):
        assert part in text, part


def test_models_of_the_package_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_root", lambda: tmp_path)
    assert shipped_names() == []
    with pytest.raises(InputError, match="There are: none"):
        shipped_model("pico")
    nano().write(_made(tmp_path / "pico"))
    assert shipped_names() == ["pico"]
    assert shipped_model("pico") == tmp_path / "pico"
    with model_folder("pico", random_init=False) as folder:
        assert folder == tmp_path / "pico"
    with pytest.raises(InputError, match=r"a model of the package \(pico\)"), model_folder("other", random_init=False):
        pass


def _made(path: Path) -> Path:
    path.mkdir()
    return path

"""`tidemill rl`: refusals with exit codes, lists, dry runs, and a whole run of a task that needs no sandbox."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loop_world import WORDS, values
from run_folder import SUMMARY, write_run

from tidemill.cli.main import main
from tidemill.cli.rl import result_lines
from tidemill.model.chat.tokenizer import build_tokenizer
from tidemill.train.config import load_recipe, recipe_names

ECHO = str(Path(__file__).with_name("loop_world.py")) + ":EchoTask"


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    code: object = 0
    try:
        main(["rl", *map(str, args)])
    except SystemExit as e:
        code = e.code
    captured = capsys.readouterr()
    assert isinstance(code, int)
    return code, captured.out, captured.err


@pytest.mark.parametrize(("args", "said"), [
    (["run"], "give either a recipe or --resume"),
    (["run", "toolcalc", "--resume", "x"], "give either a recipe or --resume"),
    (["run", "nope"], "'nope': neither a file nor one of toolcalc, toolcalc-smoke"),
    (["run", "toolcalc", "--set", "rl.promts=3"], "rl.promts: unknown key"),
    (["run", "toolcalc", "--set", "rl.prompts=0"], "prompts = 0"),
    (["run", "toolcalc", "--set", "rl.prompts"], "not of the form key.path=value"),
    (["run", "toolcalc", "--set", "rl.prompts.x=1"], "rl"),
    (["run", "toolcalc", "--set", "lora.rank=-1"], "rank = -1"),
    (["run", "toolcalc", "--set", "rl.temperature=0"], "temperature = 0"),
    (["run", "toolcalc", "--set", "eval.test_n=100000", "--dry-run"], "the test split of 'ledger' has"),
    (["run", "toolcalc", "--set", "task.name=nothing", "--dry-run"], "nothing"),
    (["run", "toolcalc", "--set", "model.preset=giant", "--dry-run"], "expected one of toy, tiny"),
    (["run", "toolcalc", "--set", "model.overrides={num_attention_heads: 0}", "--dry-run"], "num_attention_heads"),
    (["run", "toolcalc", "--set", "model.overrides.linear_attn_config.num_heads=0", "--dry-run"],
     "linear_attn_config.num_heads = 0"),
    (["run", "toolcalc", "--set", "model.overrides.linear_attn_config.nope=0", "--dry-run"], "nope: unknown key"),
    (["run", "toolcalc", "--control", "gremlin"], "expected one of frozen-engine"),
    (["run", "--resume", "x"], "'x': neither a run folder nor a run in"),
    (["run", "--resume", "x", "--seed", "1"], "--set, --seed and --dry-run do not fit"),
    (["run", "--resume", "last"], "no run in"),
    (["report", "x"], "neither a run folder"),
])
def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str],
                                               said: str) -> None:
    if "list" not in args:
        args = [*args, "--runs-dir", str(tmp_path)]
    code, out, err = call(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_every_recipe_loads_and_has_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == recipe_names() == ["toolcalc", "toolcalc-smoke"]
    for name in recipe_names():
        assert load_recipe(name).name == name
        code, out, _ = call(capsys, "run", name, "--dry-run", "--json", "--set", "rl.samples=6")
        found = json.loads(out)
        config, costs = found["config"], found["budget"]
        assert config["rl"]["samples"] == 6
        assert costs["sampled_per_episode"] <= 48
        assert costs["longest_episode"] <= config["agent"]["max_model_len"]
        assert costs["episodes_per_step"][0] == config["rl"]["prompts"] * 6
        assert costs["adapter_bytes"] > 0
    code, out, _ = call(capsys, "run", "toolcalc", "--dry-run")
    assert "of them sampled" in out
    assert "state slots" in out


def test_report_of_any_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = write_run(tmp_path)
    build_tokenizer(WORDS).save(run.base)
    code, out, _ = call(capsys, "report", "last", "--runs-dir", tmp_path)
    assert (code, Path(out.strip())) == (0, run.path / "report.html")
    assert (run.path / "report.html").is_file()
    code, _, err = call(capsys, "run", "--resume", run.name, "--runs-dir", tmp_path)
    assert code == 2
    assert "has ended (stopped by dev)" in err


def test_result_says_before_after_and_what_was_left() -> None:
    text = "\n".join(result_lines(SUMMARY))
    for part in ("before RL", "25.0%", "94.5%", "[93.0%, 96.0%]", "n = 1024", "left over 0", "verified 4"):
        assert part in text
    unfinished = SUMMARY | {"test_after": None, "ci95_after": None, "kl_last": None}
    assert "after RL" not in "\n".join(result_lines(unfinished))


def overrides(**changes: object) -> list[str]:
    return [arg for value in values(task__name=ECHO, **changes) for arg in ("--set", value)]


def test_a_whole_run_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capsys, "run", "toolcalc", "--seed", 3, "--runs-dir", tmp_path, "--json",
                          *overrides(rl__max_steps=2, warmup__max_steps=4))
    assert code == 0, err
    found = json.loads(out)
    summary = found["summary"]
    assert (summary["seed"], summary["steps"], summary["sandboxes_used"]) == (3, 2, 0)
    assert summary == json.loads((Path(found["run"]) / "summary.json").read_text())
    assert "step   2/2" in err
    assert "warm-up ran to its limit after 4 steps" in err


@pytest.mark.timeout(400)
def test_ctrl_c_in_the_warm_up_loses_no_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changes = overrides(rl__max_steps=1, warmup__max_steps=16, eval__dev_n=4, eval__test_n=4)
    argv = [sys.executable, "-m", "tidemill.cli.main", "rl", "run", "toolcalc", "--runs-dir", str(tmp_path), *changes]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    while process.poll() is None and not any('"warmup"' in p.read_text() for p in tmp_path.glob("*/events.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (out, "go on with: tidemill rl run --resume" in err) == ("", True)
    (path,) = tmp_path.iterdir()
    code, out, err = call(capsys, "run", "--resume", path, "--runs-dir", tmp_path)
    assert code == 0, err
    rows = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in rows if r["event"] == "warmup"]
    assert steps == list(range(1, len(steps) + 1))
    assert not (path / "warmup").exists()


@pytest.mark.timeout(400)
def test_ctrl_c_says_how_to_go_on_and_it_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tidemill.cli.main", "rl", "run", "toolcalc", "--runs-dir", str(tmp_path),
            *overrides(rl__max_steps=5, warmup__max_steps=2)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    while process.poll() is None and not list(tmp_path.glob("*/episodes/step-00001*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by interrupted" in out
    assert "go on with: tidemill rl run --resume" in err
    code, out, err = call(capsys, "run", "--resume", "last", "--runs-dir", tmp_path)
    assert code == 0, err
    assert "stopped by steps after 5 steps" in out
    assert "resumed from step" in err


@pytest.mark.timeout(400)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("kib", [8, 200, 1000, 1200])
def test_a_full_disk_ends_the_run_in_order_and_it_goes_on_with_more(kib: int, capsys: pytest.CaptureFixture[str],
                                                                    tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(tmp_path)], check=True)
    try:
        code, _, err = call(capsys, "run", "toolcalc", "--runs-dir", tmp_path,
                            *overrides(rl__max_steps=3, warmup__max_steps=4, checkpoint_every=1))
        assert code == 1
        assert "No space left on device" in err
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        if "--resume" in err or "resume the run" in err:
            code, out, err = call(capsys, "run", "--resume", "last", "--runs-dir", tmp_path)
            assert code == 0, err
            assert "stopped by steps after 3 steps" in out
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)

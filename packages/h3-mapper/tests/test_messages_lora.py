"""What a refusal of an adapter says, word for word: its field, its sizes, what it is instead; each with a twin."""

import json
from pathlib import Path

import pytest
from h3_mapper.cli import main
from lora_testkit import write_lora
from mapper_testkit import write_file

FIRST, SECOND = (f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2))


def test_an_adapter_for_other_sizes_asks_for_the_config(said, src, capsys):
    write_lora("l.safetensors")
    assert said("lora", "inspect", "l.safetensors", "--alpha", "rank") == (
        "l.safetensors: transformer_blocks.0.attn.to_q: A is [2, 48]; expected [rank, 5376]; the released model's "
        "sizes are assumed; for a model of other sizes pass its config.json (--config, config=)"
    )
    assert main(["lora", "inspect", "l.safetensors", "--alpha", "rank", "--config", "src/config.json"]) == 0
    capsys.readouterr()
    write_lora("other.safetensors", columns=47)
    assert said("lora", "inspect", "other.safetensors", "--config", "src/config.json") == (
        "other.safetensors: transformer_blocks.0.attn.to_q: A is [2, 47]; expected [rank, 48]; the adapter was made "
        "for a model of other sizes"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; expected a number"),
        ({"r": [2]}, "r is [2]; expected a number"),
        ({"rank_pattern": [1]}, "rank_pattern is [1]; expected an object of pattern -> number"),
        ({"alpha_pattern": {"to_q": "x"}}, "alpha_pattern['to_q'] is 'x'; expected a number"),
        (
            {"alpha_pattern": {"(": 3}},
            "alpha_pattern has '(', no regular expression (missing ), unterminated subpattern at position 0)",
        ),
    ],
)
def test_a_broken_adapter_config_is_named_by_its_field(said, src, change, message):
    Path("peft").mkdir()
    write_lora("peft/adapter_model.safetensors")
    settings = {"r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {"to_k": 8}}
    config = Path("peft/adapter_config.json")
    config.write_text(json.dumps(settings | change))
    inspect = ("lora", "inspect", "peft", "--config", "src/config.json")
    assert said(*inspect) == f"peft/adapter_model.safetensors: adapter_config.json: {message}"
    config.write_text(json.dumps(settings))
    assert main(list(inspect)) == 0


def test_a_component_that_the_adapter_does_not_have_is_named(said, src):
    write_lora("l.safetensors")
    inspect = [
        "lora",
        "inspect",
        "l.safetensors",
        "--config",
        "src/config.json",
        "--alpha",
        "rank",
        "--component",
    ]
    assert said(*inspect, "transformer_ref") == (
        "l.safetensors: no tensor is of component 'transformer_ref'; the file holds transformer"
    )
    assert main([*inspect, "transformer"]) == 0


def test_what_is_no_adapter_says_what_it_is(said, src):
    write_file(Path("none.safetensors"), {})
    assert said("lora", "inspect", "none.safetensors") == (
        "none.safetensors: holds no tensor; expected an adapter's factors: export it again"
    )
    Path("peft").mkdir()
    Path("peft/adapter_model.bin").write_bytes(b"PK")
    assert said("lora", "inspect", "peft") == (
        "peft: expected adapter_model.safetensors or exactly one .safetensors file, found none; pickled weights are "
        "never opened (adapter_model.bin): save them as safetensors"
    )
    assert said("lora", "inspect", "src").endswith(
        f"found {FIRST}, {SECOND}; point at the adapter, not at a model"
    )
    name = "transformer_blocks.9.attn.to_q.lora_{}.weight".format
    write_file(Path("deep.safetensors"), {name(side): ("BF16", [1, 1], bytes(2)) for side in "AB"})
    assert said("lora", "inspect", "deep.safetensors", "--config", "src/config.json") == (
        "deep.safetensors: none of 1 modules is one of MiniMax-H3's: transformer_blocks.9.attn.to_q; expected names "
        "such as transformer_blocks.0.attn.to_q or blocks.0.attn.qkv_proj, and blocks below 2; the adapter was made "
        "for a model of other sizes"
    )

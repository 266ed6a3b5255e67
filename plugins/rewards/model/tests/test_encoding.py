"""What the reward model reads of a sample, and what it refuses."""

import pytest
import tiny_reward_models as made
from pydantic import ValidationError

from rlhf_core.components import RewardContext
from rlhf_core.errors import UserInputError
from rlhf_reward_model.config import ModelRewardConfig
from rlhf_reward_model.encoding import RolloutEncoder, same_tokenizer
from rlhf_reward_model.reward import build

OTHER = "zyxwvutsrqponmlkjihgfedcba 9876543210>,<|/"
CHAT = ({"role": "user", "content": "sort"},)


def encoder(tokenizer, *, same_tokenizer=False, pools_itself=False, limit_tokens=64, **options):
    config = ModelRewardConfig(path="no-such-owner/no-such-model", **options)
    return RolloutEncoder(
        tokenizer, config, same_tokenizer=same_tokenizer, pools_itself=pools_itself, limit_tokens=limit_tokens
    )


def text(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_the_policys_own_tokens_where_the_tokenizers_are_the_same(rollout):
    tokenizer = made.make_tokenizer()
    sample = rollout(0, "12", tokenizer, prompt="21>")
    ids, positions = encoder(tokenizer, same_tokenizer=True).encode(sample)
    assert positions == [len(ids) - 1]
    assert ids == [*sample.prompt_ids, *sample.completion_ids]


@pytest.mark.parametrize(("reason", "end"), [("stop", "<eos>"), ("length", "")])
def test_a_text_is_tokenized_anew_and_ends_as_the_answer_did(rollout, reason, end):
    own = made.make_tokenizer(OTHER)
    ids = encoder(own).encode(rollout(0, "12", prompt="21>", finish_reason=reason)).ids
    assert text(own, ids) == "21>12" + end


def test_a_cut_answer_may_be_ended_for_the_reward_model(rollout):
    own = made.make_tokenizer(OTHER)
    cut, whole = rollout(0, "12", prompt="21>", finish_reason="length"), rollout(1, "12", prompt="21>")
    ending = encoder(own, append_eos=True)
    assert [text(own, ending.encode(each).ids) for each in (cut, whole)] == ["21>12<eos>"] * 2
    same = made.make_tokenizer()
    ending = encoder(same, append_eos=True, same_tokenizer=True)
    assert [text(same, ending.encode(each).ids) for each in (cut, whole)] == ["21>12<eos>"] * 2


def test_a_chat_is_rendered_in_the_reward_models_own_template(rollout):
    own = made.make_tokenizer(OTHER, template="{% for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}/")
    chat = rollout(0, "12", messages=CHAT, prompt="the policy's rendering")
    assert text(own, encoder(own).encode(chat).ids) == "|user|sort|assistant|12/"
    assert text(own, encoder(own, encoding="continuation").encode(chat).ids) == "|user|sort/12<eos>"


def test_a_model_that_pools_itself_reads_the_text_as_a_whole(rollout):
    own = made.make_tokenizer(OTHER)
    assert text(own, encoder(own, pools_itself=True).encode(rollout(0, "12", prompt="21>")).ids) == "21>12"


def test_a_sample_that_is_too_long_is_named_or_cut(rollout):
    own = made.make_tokenizer(OTHER)
    long = rollout(7, "123456789")
    with pytest.raises(ValueError, match=r"sample 7 is 14 tokens long, the reward model reads 5.*too_long: cut"):
        encoder(own, limit_tokens=5).encode(long)
    assert text(own, encoder(own, limit_tokens=5, too_long="cut").encode(long).ids) == "6789<eos>"
    assert text(own, encoder(own, limit_tokens=5, too_long="cut", pools_itself=True).encode(long).ids) == "312>1"


@pytest.mark.parametrize(
    ("encoding", "messages", "template", "said"),
    [
        ("conversation", None, made.TEMPLATE, "sample 3 is not a chat.*encoding: continuation"),
        ("auto", CHAT, None, "lacks a chat template.*chat_template.jinja"),
        ("auto", CHAT, "{{ raise_exception('no tools') }}", "refuses it: no tools"),
        ("auto", CHAT, "{{ 1 / 0 }}", "refuses it: division by zero"),
    ],
)
def test_a_sample_that_cannot_be_rendered_is_named(rollout, encoding, messages, template, said):
    own = made.make_tokenizer(OTHER, template=template)
    with pytest.raises(ValueError, match=said):
        encoder(own, encoding=encoding).encode(rollout(3, "12", messages=messages))


def test_which_tokenizers_are_the_same():
    one, again = made.make_tokenizer(), made.make_tokenizer()
    again(["1", "22"], padding=True, truncation=True, max_length=2)  # leaves marks in the tokenizer, but no other
    assert same_tokenizer(one, again)
    assert not same_tokenizer(one, made.make_tokenizer(OTHER))
    assert not same_tokenizer(one, made.make_tokenizer(template="{{ messages }}"))
    again.eos_token = "<bos>"
    assert not same_tokenizer(one, again)


def test_auto_looks_at_the_policys_tokenizer(save, rollout):
    tokenizer, other = made.make_tokenizer(), made.make_tokenizer(OTHER)
    model = made.make_model("llama", tokenizer)
    path, policy = save(model, tokenizer), save(None, tokenizer, "policy")
    stranger = save(None, other, "stranger")
    sample = rollout(0, "12")
    ids_that_say_otherwise = rollout(0, "99", prompt="312>")
    mixed = rollout(0, "12", completion_ids=ids_that_say_otherwise.completion_ids)

    def score(model_path, sample):
        return build(ModelRewardConfig(path=path), RewardContext("cpu", 0, model_path))([sample])[0]

    assert score(policy, mixed) == pytest.approx(score(policy, ids_that_say_otherwise))
    assert score(stranger, mixed) == pytest.approx(score(None, sample)) == pytest.approx(score(policy, sample))


def test_a_folder_that_is_no_reward_model_is_told_before_the_run(save, tmp_path):
    tokenizer = made.make_tokenizer()
    for path, said in [
        (save(made.make_model("llama", tokenizer), None, "bare"), "contains no tokenizer"),
        (save(None, tokenizer, "empty"), "no config.json"),
        (str(tmp_path / "nowhere"), "no such folder"),
    ]:
        with pytest.raises(ValidationError, match=said):
            ModelRewardConfig(path=path)


def test_a_model_that_could_not_score_is_refused_by_name(save):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = made.make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    causal = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32))
    several = save(made.make_model("llama", tokenizer, labels=2), tokenizer, "several")
    for options, said in [
        ({"path": save(causal, tokenizer, "causal")}, r"lack score\.weight.*trained head"),
        ({"path": several}, "2 labels .*label_index: 0"),
        ({"path": several, "label_index": 2}, "label_index is 2, but"),
    ]:
        with pytest.raises(UserInputError, match="(?s)" + said):
            build(ModelRewardConfig(**options), RewardContext("cpu", 0))

"""`rlhf plugins show`: the kind is found, and what is shown is what a user would set."""

import json

from rlhf_cli.main import run


def shown(capsys, *arguments, code=0):
    assert run(["plugins", "show", *arguments]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_the_kind_is_found_where_the_name_is_given_once(capsys):
    assert shown(capsys, "early-stop").startswith("hooks/early-stop (rlhf-guards")
    assert shown(capsys, "early_stop").startswith("hooks/early-stop (rlhf-guards")
    assert shown(capsys, "clip").startswith("policy_losses/clip (")


def test_a_name_of_two_kinds_and_of_none(install, capsys):
    install("acme", {"rlhf.engines": {"same": "a:b"}, "rlhf.transports": {"same": "a:b"}})
    assert "rlhf plugins show transports/same or engines/same" in shown(capsys, "same", code=2)
    assert 'no plugin "clipp" is installed; did you mean "clip"?' in shown(capsys, "clipp", code=2)


def test_a_policy_loss_and_an_advantage_have_options_and_docstring(capsys):
    loss = shown(capsys, "policy-loss/clip")
    assert "PPO's clipped ratio" in loss and "clip_eps_high  number > 0 | null" in loss
    estimator = json.loads(shown(capsys, "advantages/group-normalised", "--json"))
    assert estimator["options"]["properties"]["divide_by_std"]["default"] is True
    assert estimator["doc"].startswith("(reward - mean of its group)")


def test_a_reward_shows_all_of_its_docstring_once(capsys):
    told = shown(capsys, "exact-match")
    assert told.count("1 if the completion equals") == 1
    assert "ValueError: if a sample lacks an answer" in told


def test_a_module_of_hooks_and_a_command(install, capsys):
    install("acme", {"rlhf.hooks": {"acme-ear": "acme_ear"}}, {"acme_ear": '"Listens."\ndef rlhf_fit_start(): pass'})
    assert "Listens." in (told := shown(capsys, "acme-ear")) and "enabled once it is installed" in told
    assert "Serve a run's model" in shown(capsys, "commands/serve")

"""What a run needs before its weights."""

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.wiring import RunInputs
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_prompt_source_is_told_whether_the_model_has_a_chat_template(monkeypatch, template):
    contexts = []
    original = SelectedPlugin.build

    def build(selected, config, context):
        if selected.kind != "prompts":
            return original(selected, config, context)
        contexts.append(context)
        return [{"prompt": "1"}]

    monkeypatch.setattr(SelectedPlugin, "build", build)
    inputs = RunInputs(resolve(tiny_run()))
    inputs.tokenizer = tiny_tokenizer()
    inputs.tokenizer.chat_template = template
    inputs.stream_of(None)
    assert [context.has_chat_template for context in contexts] == [template is not None]

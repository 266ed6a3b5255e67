"""Agents of other libraries, and their masks (`make soak-clients`)."""

import asyncio
from functools import partial
from importlib.util import find_spec

import openai
import pytest
from calling_agents import ADD, CALL
from slow_masks import check_masks
from test_dialects import agent

pytestmark = pytest.mark.usefixtures("nothing_is_left")
QUESTION = "1 and 2?"
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>'


def needs(module):
    return pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}: make env-clients")


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    """Nothing is fetched, and nothing is reported."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


@needs("agents")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("way", ["at once", "streamed", "by the id of the response"])
def test_openai_agents_calls_a_tool(model, way):
    import agents

    if model == "OpenAIChatCompletionsModel" and way == "by the id of the response":
        pytest.skip("only Responses have ids")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def run(endpoint, policy):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            asked = agents.Agent(
                name="adder",
                instructions="Be brief.",
                tools=[add],
                model=getattr(agents, model)(model=endpoint.model, openai_client=client),
            )
            if way == "streamed":
                found = agents.Runner.run_streamed(asked, QUESTION)
                assert [event.type async for event in found.stream_events()]
            else:
                found = await agents.Runner.run(asked, QUESTION, auto_previous_response_id=way != "at once")
        assert found.final_output == "3"

    episode, engine = agent(run, (f"Let me see.\n{CALL}", "3"))
    (row,) = episode.rows
    assert [turn.role for turn in row.turns] == ["policy", "environment", "policy"]
    check_masks(episode, engine)


@needs("smolagents")
@pytest.mark.filterwarnings("default")
def test_smolagents_writes_code_and_calls_tools():
    import smolagents

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        return a + b

    def ask(endpoint, kind):
        # By default, a ToolCallingAgent forces a call in each reply.
        options = {"max_tokens": 100, "tool_choice": "auto"} if kind is smolagents.ToolCallingAgent else {}
        model = smolagents.OpenAIServerModel(
            endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key, **options
        )
        return str(kind(tools=[add], model=model, max_steps=3, verbosity_level=0).run(QUESTION))

    async def run(kind, endpoint, policy):
        assert await asyncio.to_thread(ask, endpoint, kind) == "3"

    code = "Thought: I add them.\n<code>\nprint(add(1, 2))\n</code>"
    for kind, texts in (
        (smolagents.CodeAgent, (code, "Thought: done.\n<code>\nfinal_answer(3)\n</code>")),
        (smolagents.ToolCallingAgent, (CALL, FINAL)),
    ):
        episode, engine = agent(partial(run, kind), texts)
        assert len(engine.turns) == 2
        check_masks(episode, engine)


@needs("litellm")
@pytest.mark.filterwarnings("default")
def test_litellm_speaks_each_dialect():
    import litellm

    tools = [ADD]
    responses_tools = [{"type": "function", **ADD["function"]}]

    async def run(endpoint, policy):
        for provider, url in (("openai", endpoint.base_url), ("anthropic", endpoint.anthropic_base_url)):
            asked = {"model": f"{provider}/{endpoint.model}", "api_base": url, "api_key": endpoint.api_key}
            messages = [{"role": "user", "content": QUESTION}]
            found = await litellm.acompletion(**asked, messages=messages, tools=tools, max_tokens=100)
            message = found.choices[0].message
            assert found.choices[0].finish_reason == "tool_calls"
            told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            messages += [message.model_dump(exclude_none=True), told]
            found = await litellm.acompletion(**asked, messages=messages, tools=tools, max_tokens=100)
            assert found.choices[0].message.content == "3"
        asked = {"model": f"openai/{endpoint.model}", "api_base": endpoint.base_url, "api_key": endpoint.api_key}
        found = await litellm.aresponses(**asked, input=QUESTION, tools=responses_tools)
        call = next(item for item in found.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        found = await litellm.aresponses(**asked, input=[output], previous_response_id=found.id, tools=responses_tools)
        assert found.output[0].content[0].text == "3"

    episode, engine = agent(run, (f"Let me see.\n{CALL}", "3") * 3)
    check_masks(episode, engine)
    assert [[turn.role for turn in row.turns] for row in episode.rows] == [["policy", "environment", "policy"]] * 3
    assert len({row.sequence for row in episode.rows}) == 1

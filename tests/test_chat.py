"""Conversations to texts and spans: templates with and without generation blocks, the plain form, prompt and answer."""

import pytest

from trainer.data.chat import ChatTemplate, UnusableError, parts_of, plain, unmark
from trainer.errors import ConfigError

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]
CHATML = """{% for m in messages %}
<|{{ m.role }}|>{{ m.content }}<end>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>{% endif %}"""
MARKED = """{% for m in messages %}
{% if m.role == "assistant" %}
<|assistant|>{% generation %}{{ m.content }}<end>{% endgeneration %}

{% else %}
<|{{ m.role }}|>{{ m.content }}<end>
{% endif %}
{% endfor %}"""
# As published reasoning models do: what the assistant thought is left out of all turns but the last.
FORGETFUL = """{% for m in messages %}
<|{{ m.role }}|>{% if m.role == "assistant" and not loop.last %}{{ m.content.split("</think>")[-1] }}{% else %}
{{ m.content }}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def template(source, eos="<end>"):
    return ChatTemplate(source, "chat_template.jinja", "<s>", eos)


def trained(parts):
    return [[part.text[start:stop] for start, stop in part.spans] for part in parts]


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["by the prompt", "by blocks"])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_the_assistant_is_told_from_the_rest(source, system):
    (part,) = template(source).parts([*system, *CHAT], everything=False)
    head = "<|system|>Be brief.<end>\n" if system else ""
    turns = "<|user|>Hi<end>\n<|assistant|>Hello!<end>\n<|user|>Bye<end>\n<|assistant|>So long.<end>\n"
    assert part.text == head + turns
    says = [text.rstrip("\n") for text in trained([part])[0]]
    assert says == ["Hello!<end>", "So long.<end>"]
    assert part.special and part.end is None  # the template ends the document itself


def test_everything_is_one_span():
    (part,) = template(MARKED).parts(CHAT, everything=True)
    assert part.whole


def test_a_template_that_rewrites_earlier_turns_needs_blocks():
    chat = [CHAT[0], {"role": "assistant", "content": "hm</think>Hello!"}, *CHAT[2:]]
    assert template(FORGETFUL).parts(chat[:2], everything=False)
    with pytest.raises(UnusableError, match=r"writes message 2 in another way.*\{% generation %\}.*train_on=all"):
        template(FORGETFUL).parts(chat, everything=False)
    assert template(FORGETFUL).parts(chat, everything=True)[0].whole


def test_a_template_without_an_end_gets_one_that_is_no_target():
    (part,) = template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").parts(CHAT[:2], True)
    assert part.end is True
    (part,) = template(MARKED, eos="<eos>").parts(CHAT[:2], everything=False)
    assert part.end is False


def test_what_published_templates_use_is_there():
    source = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
    assert template(source).parts(CHAT[:2], True)[0].text == '{"role": "assistant", "content": "Hello!"}'
    refuses = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnusableError, match="chat_template.jinja does not take it: roles must alternate"):
        refuses.parts(CHAT, True)
    with pytest.raises(UnusableError, match="does not take it"):
        template("{{ messages[0].nothing.there }}").parts(CHAT, True)
    with pytest.raises(UnusableError, match="does not take it"):  # the sandbox
        template("{{ messages.__class__.__mro__[1].__subclasses__() }}").parts(CHAT, True)
    with pytest.raises(ConfigError, match="chat_template.jinja is no Jinja template"):
        template("{% for %}").parts(CHAT, True)


def test_the_plain_form_ends_each_answer():
    parts = plain([SYSTEM, *CHAT], everything=False)
    assert [part.text for part in parts] == [
        "system: Be brief.\nuser: Hi\nassistant: Hello!",
        "user: Bye\nassistant: So long.",
    ]
    assert trained(parts) == [["Hello!"], ["So long."]]
    assert [part.end for part in parts] == [True, True]
    assert all(part.whole and part.end for part in plain(CHAT, everything=True))
    (asked,) = plain(CHAT[:1], everything=False)
    assert (asked.text, asked.spans, asked.end) == ("user: Hi\n", (), False)


def test_prompt_and_completion():
    record = {"q": "2 + 2 = ", "a": "4", "id": 7}
    (part,) = parts_of(record, ["q", "a"], None, everything=False)
    assert (part.text, trained([part]), part.end) == ("2 + 2 = 4", [["4"]], True)
    assert parts_of(record, ["q", "a"], None, everything=True)[0].whole


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        ({"body": "x", "id": 1}, ["text"], r'no field "text" \(it has body, id\)'),
        ({}, ["text"], r"it has none"),
        ({"text": None}, ["text"], '"text" is a NoneType, not a string'),
        ({"q": "x", "a": 4}, ["q", "a"], '"a" is a int, not a string'),
        ({"text": "\ud83d"}, ["text"], "not valid Unicode"),
        ({"m": ["x"]}, ["m"], r'"m": message 1 is no \{"role"'),
        ({"m": [{"role": "user", "content": [{"type": "image"}]}]}, ["m"], "content of message 1 is a list"),
        ({"m": [{"role": "user", "content": "a\ufdd0b"}]}, ["m"], r"holds U\+FDD0"),
    ],
)
def test_records_that_are_no_documents_say_why(record, columns, message):
    with pytest.raises(UnusableError, match=message):
        parts_of(record, columns, None, everything=False)


def test_marks_become_spans():
    assert unmark("a\ufdd0bc\ufdd1d\ufdd0\ufdd1") == ("abcd", ((1, 3), (4, 4)))
    assert unmark("") == ("", ())

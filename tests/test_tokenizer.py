"""Token ids: bytes, tokenizer.json files, and what is refused at start."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from trainer.data.chat import Part
from trainer.data.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import ConfigError

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<": 4, "/": 5, "s": 6, ">": 7, "</s>": 8, "<s>": 9}


def word_tokenizer(path, *, special=("</s>", "<s>"), vocab=WORDS, unk="[UNK]"):
    """A tokenizer.json of words and punctuation, with everything in it that must not touch the data."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    tokenizer.add_special_tokens(list(special))
    if "<s>" in vocab:
        start = [("<s>", vocab["<s>"])]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(path))
    return str(path)


def encode(tokenizer, text):
    ((ids, targets),) = tokenizer.encode([Part(text, ((0, len(text)),), end=True)])
    assert targets is None
    return ids.tolist()


def test_bytes_are_ids_and_the_end_is_none_of_them():
    text = "naïve 漢字 😀 \x00 \r\n"
    tokenizer = ByteTokenizer()
    ids = encode(tokenizer, text)
    assert bytes(ids).decode("utf-8") == text
    assert tokenizer.eos_id == 256 and tokenizer.num_ids == 257
    assert encode(tokenizer, "") == []


def test_byte_tokenizer_needs_257_rows():
    assert load_tokenizer("byte", 257).num_ids == 257
    with pytest.raises(ConfigError, match=r"tokenizer_path=byte has token ids up to 256.*model.vocab_size=256"):
        load_tokenizer("byte", 256)


def test_file_encodes_the_text_alone(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"), 10)
    assert (tokenizer.eos_id, tokenizer.num_ids) == (8, 10)
    # No truncation to 2, no padding to 12, no <s> in front: the file asks for all three.
    assert encode(tokenizer, "one two three one") == [1, 2, 3, 1]


def test_a_special_token_spelled_in_a_document_is_text(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"), 10)
    ids = encode(tokenizer, "one </s> two")
    assert ids == [1, 4, 5, 6, 7, 2]
    assert tokenizer.eos_id not in ids


def test_file_with_ids_beyond_the_model_is_refused(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"ids up to 9, and model.vocab_size=9 has rows up to 8 only.*to 10 or more"):
        load_tokenizer(path, 9)


@pytest.mark.parametrize("named", ["<s>", {"content": "<s>", "lstrip": False}])
def test_config_beside_the_file_names_the_end(tmp_path, named):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert load_tokenizer(path, 10).eos_id == WORDS["<s>"]


@pytest.mark.parametrize("content", [{}, {"eos_token": None}])
def test_config_without_an_end_leaves_it_to_the_usual_names(tmp_path, content):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert load_tokenizer(path, 10).eos_id == WORDS["</s>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token": "<end>"}', "eos_token='<end>', which .* doesn't know"),
        ('{"eos_token": ["</s>"]}', "doesn't know"),
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
    ],
)
def test_config_that_names_no_end_is_refused(tmp_path, content, message):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(path, 10)


def test_file_without_one_end_is_refused(tmp_path):
    none = word_tokenizer(tmp_path / "none.json", special=(), vocab={"[UNK]": 0, "one": 1})
    with pytest.raises(ConfigError, match='no usual token to end a document: name one as "eos_token"'):
        load_tokenizer(none, 10)
    two = word_tokenizer(tmp_path / "two.json", special=("</s>", "<eos>"))
    with pytest.raises(ConfigError, match="</s> and <eos> to end a document"):
        load_tokenizer(two, 20)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b'{"model": {"type": "other"}}', b"\xff\xfe"])
def test_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer_path.*tokenizer.json"):
        load_tokenizer(str(path), 10)


def test_a_missing_file_is_refused_and_a_folder_is_searched(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.json"):
        load_tokenizer(str(tmp_path / "absent.json"), 10)
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(str(tmp_path), 10)
    word_tokenizer(tmp_path / "tokenizer.json")
    assert encode(load_tokenizer(str(tmp_path), 10), "one two") == [1, 2]


def test_text_the_file_cannot_encode_is_refused(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json", unk="<missing>"), 10)
    with pytest.raises(ConfigError, match="cannot encode the text of dataset_path"):
        encode(tokenizer, "one four")


def test_a_token_is_a_target_if_any_of_its_characters_is(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"), 10)
    parts = [
        Part("one two three one", ((4, 13),), end=True),
        Part("one two", ((0, 7),), end=True),
        Part("one two", ((6, 7),), end=True),
        Part("one two", (), end=True),
        Part("one </s> two", ((4, 12),), end=True),
        Part("one </s> two", ((4, 12),), end=True, special=True),
    ]
    encoded = [(ids.tolist(), None if some is None else some.tolist()) for ids, some in tokenizer.encode(parts)]
    assert encoded == [
        ([1, 2, 3, 1], [False, True, True, False]),
        ([1, 2], None),
        ([1, 2], [False, True]),
        ([1, 2], [False, False]),
        ([1, 4, 5, 6, 7, 2], [False, True, True, True, True, True]),
        ([1, 8, 2], [False, True, True]),
    ]


def test_spans_of_bytes_count_characters():
    ((ids, targets),) = ByteTokenizer().encode([Part("é漢x", ((1, 2),), end=True)])
    assert bytes(ids.tolist()).decode() == "é漢x" and targets.tolist() == [False] * 2 + [True] * 3 + [False]


def test_decode_shows_special_tokens(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"), 10)
    assert tokenizer.decode([1, 8, 2]) == "one </s> two"
    assert ByteTokenizer().decode([104, 105, 256, 33]) == "hi!"


@pytest.mark.parametrize("where", ["file", "config", "named"])
def test_the_chat_template_is_found_beside_the_tokenizer(tmp_path, where):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(path, 10).chat is None
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": source}]
    beside = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    beside |= {"chat_template": {"file": "no", "config": source, "named": templates}[where]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
    chat = load_tokenizer(path, 10).chat
    (part,) = chat.parts([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], True)
    assert part.text == "<s>one</s>two</s>" and part.special and part.end is None

"""Chat templates: rendering as transformers does, and hostile templates."""

import json
import pathlib
import tempfile
import threading
import time

from absl.testing import absltest, parameterized
import numpy as np

from longstraw_jax import chat
from longstraw_jax.chat import ChatTemplate, load_chat_template
from tests.gguf_files_test import write_gguf

HELLO = [{"role": "user", "content": "Hello"}]
TURNS = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "a\n"},
  {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
  {"role": "user", "content": [{"type": "text", "text": "d"}, "e"]},
]
CHATML = (
  "{%- for m in messages %}\n"
  "{{- '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>\\n' }}\n"
  "{%- endfor %}\n"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_folder(test):
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


def render(source, messages=HELLO, **kwargs):
  return ChatTemplate(source).render(messages, **kwargs)


class RenderTest(parameterized.TestCase):
  def test_chatml(self):
    got = render(CHATML)
    want = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    self.assertEqual(got, want)
    got = render(CHATML, add_generation_prompt=False)
    self.assertEqual(got, "<|im_start|>user\nHello<|im_end|>\n")

  def test_what_templates_in_use_do(self):
    """Macros, namespaces, splits, reversed messages, joins over parts."""
    source = """
    {%- macro text(content) -%}
      {%- if content is string %}{{ content }}
      {%- else %}
        {%- for part in content %}{{ part.text or part }}{% endfor %}
      {%- endif %}
    {%- endmacro %}
    {%- set ns = namespace(last=-1) %}
    {%- for m in messages[::-1] %}
      {%- if m.role == 'user' and ns.last < 0 %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
      {%- endif %}
    {%- endfor %}
    {%- for m in messages if m.role != 'system' %}
      {%- set words = text(m.content) %}
      {%- if '</think>' in words %}
        {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
      {%- endif %}
      {{- '[' ~ loop.index ~ m.role|upper + ':' + words|trim + ']' }}
      {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- endfor %}
    {{- ns.last }}{{ messages|map(attribute='role')|list|unique|join(',') }}
    {{- {'b': 1, 'a': 2}|dictsort }}{{ missing }}{{ none }}
    {{- messages|selectattr('role', 'equalto', 'system')|list|length }}
    {%- generation %}G{% endgeneration %}
    """
    got = render(source, TURNS)
    want = (
      "[1USER:a][2ASSISTANT:c][3USER:de]3system,user,assistant"
      "[('a', 2), ('b', 1)]None1G"
    )
    self.assertEqual(got.strip(), want)

  @parameterized.parameters(
    ("{{ x|tojson }}", '{"b": "é<>", "a": [1, null]}'),
    ("{{ x|tojson(sort_keys=true, indent=1) }}", None),
    ("{{ x|tojson(ensure_ascii=true, separators=(',', ':')) }}", None),
  )
  def test_tojson(self, source, want):
    x = {"b": "é<>", "a": [1, None]}
    if "indent" in source:
      want = json.dumps(x, sort_keys=True, indent=1, ensure_ascii=False)
    elif "separators" in source:
      want = json.dumps(x, separators=(",", ":"))
    self.assertEqual(render(source, x=x), want)

  def test_variables(self):
    source = "{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ effort }}"
    made = ChatTemplate(source, "<s>", "</s>")
    self.assertEqual(made.render(HELLO, effort="low"), "<s>|</s>|True|low")
    self.assertEqual(made.render(HELLO, tools=[1]), "<s>|</s>|False|")
    got = render("{{ bos_token is defined }}")
    self.assertEqual(got, "False")

  def test_whitespace_and_dates(self):
    self.assertEqual(render("  {% if true %}\nx\n  {% endif %}\ny"), "x\ny")
    self.assertEqual(
      render("{{ strftime_now('%Y-%m-%d') }}"), time.strftime("%Y-%m-%d")
    )

  def test_a_refusal_of_the_template_reaches_the_user(self):
    with self.assertRaisesRegex(ValueError, "refuses the messages: no system"):
      render("{{ raise_exception('no system role') }}")

  def test_prompts_of_millions_of_tokens(self):
    long = [{"role": "user", "content": "word " * 2_000_000}]
    start = time.monotonic()
    self.assertLen(render(CHATML, long), 10_000_000 + 50)
    self.assertLess(time.monotonic() - start, 60)

  def test_threads_have_meters_of_their_own(self):
    made = ChatTemplate("{% for i in range(2000) %}{{ i }}{% endfor %}")
    got = []
    threads = [
      threading.Thread(target=lambda: got.append(made.render(HELLO)))
      for _ in range(4)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(got, ["".join(map(str, range(2000)))] * 4)

  @parameterized.named_parameters(
    ("object", [{"content": object()}], r"messages\[0\]\['content'\] is a obj"),
    ("array", [{"content": np.zeros(2)}], "is a ndarray: give text"),
    ("text", "Hello", "messages are a str: give a list"),
  )
  def test_refuses_other_than_plain_data(self, messages, message):
    with self.assertRaisesRegex(ValueError, message):
      render("x", messages)

  def test_refuses_bottomless_data(self):
    loop = []
    loop.append(loop)
    with self.assertRaisesRegex(ValueError, "nested deeper than 64"):
      render("x", loop)

  @parameterized.parameters(
    ("{% for %}", "malformed in line 1: Expected an expression"),
    ("\n{{ x|nofilter }}", "line 2: No filter named 'nofilter'"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ a.b.c }}", "'a' is undefined"),
    ("{{ f() }}", "'f' is undefined"),
    ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate"),
    ("{% include 'x' %}", "Include is not for chat templates"),
    ("{% autoescape true %}{% endautoescape %}", "not for chat templates"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
    ("{{ " + "9" * 5000 + " }}", "malformed: ValueError"),
    ("x" * 200_000, "has 200000 characters, allowed are 131072"),
  )
  def test_errors_are_one_line(self, source, message):
    with self.assertRaisesRegex(ValueError, message) as raised:
      render(source)
    self.assertNotIn("\n", str(raised.exception))
    self.assertLess(len(str(raised.exception)), 700)


def doubling(step, start="'x'", show="ns.s|length"):
  """A template that would double something 60 times."""
  return (
    "{% set ns = namespace(s=" + start + ") %}{% for i in range(60) %}" + step
    + "{% endfor %}{{ " + show + " }}"
  )  # fmt: skip


SET = "{% set ns.s = "
BIG = "{% set l = range(99999)|list %}"
MANY = "range(99999)|map(attribute='z', default="


class HostileTemplateTest(parameterized.TestCase):
  def _refused(self, source, message, timeout_s=5):
    start = time.monotonic()
    with self.assertRaisesRegex(ValueError, message) as raised:
      ChatTemplate(source, timeout_s=timeout_s).render(HELLO)
    self.assertLess(time.monotonic() - start, 60)  # milliseconds, as a rule
    self.assertNotIn("\n", str(raised.exception))

  @parameterized.parameters(
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ [messages]|map(attribute='__class__')|list }}",
    "{{ messages|map(attribute='content.__class__')|list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ self.__init__ }}",
    "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
  )
  def test_no_way_into_python(self, source):
    self._refused(source, "failed: it takes '")

  @parameterized.parameters(
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '%s'.format_map(messages[0]) }}",
    "{{ ''.encode() }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
  )
  def test_no_other_methods(self, source):
    self._refused(source, "failed: it calls '")

  @parameterized.parameters("attr", "center", "batch", "format", "pprint")
  def test_no_other_filters(self, name):
    self._refused("{{ 'x'|" + name + "(9) }}", f"No filter named '{name}'")

  @parameterized.parameters(
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "{% for i in range(99999) if (range(9999)|sum) < 0 %}"
    "{% endfor %}{% for i in 'x' * 99999 %}{% for j in 'x' * 99999 if false %}"
    "{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) %}{% set _ = f(n - 1) %}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    BIG + "{{ range(99999)|reject('in', l)|first }}",
    BIG + "{{ range(99999)|reject('in', l)|min }}",
    BIG + "{{ " + MANY + "l)|min }}",
    "{% set s = 'x' * 999999 %}{% set t = 'x' * 99999 ~ 'y' %}"
    + "{% set x = t in s and t in s %}" * 300,
  )
  def test_time(self, source):
    self._refused(source, "takes longer than 0.2 seconds", timeout_s=0.2)

  @parameterized.parameters(
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * [1] }}",
    "{% set x = 'x' * 10**9 * 10**9 %}",
    doubling(SET + "ns.s + ns.s %}"),
    doubling(SET + "ns.s ~ ns.s %}"),
    doubling(SET + "[ns.s, ns.s]|join %}"),
    doubling(SET + "''.join([ns.s, ns.s]) %}"),
    doubling(SET + "ns.s|replace('x', 'xx') %}"),
    doubling(SET + "ns.s.replace('', 'x') %}"),
    doubling(SET + "'%s%s' % (ns.s, ns.s) %}"),
    doubling("{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}" + SET + "t %}"),
    doubling(
      "{% set t %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}"
      "{% endset %}" + SET + "t %}"
    ),
    "{% set s = 'x' * 900000 %}" + "{% set a = s[1:] %}" * 99,
    "{% set s = 'x' * 900000 %}" + "{% set a = s.split('x') %}" * 99,
    "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "{% set s = 'x' * 900000 %}{{ " + MANY + "s)|join }}",
    "{{ strftime_now('%c' * 99999) }}",
  )
  def test_memory(self, source):
    self._refused(source, "makes more than 16")

  @parameterized.parameters(
    doubling(SET + "[ns.s, ns.s] %}", "[1]"),
    doubling(SET + "(ns.s, ns.s) %}", "[1]"),
    doubling(SET + "{1: ns.s, 2: ns.s} %}", "[1]"),
    doubling(SET + "dict(a=ns.s, b=ns.s) %}", "[1]"),
    BIG + "{{ " + MANY + "l)|list|string }}",
    BIG + "{{ " + MANY + "l)|sort }}",
  )
  def test_lists_do_not_multiply(self, source):
    self._refused(source, "a list of more than 1000000 values")

  @parameterized.parameters(
    ("{{ '%999999999d' % 1 }}", "formats to a width"),
    ("{{ '%*d' % (999999999, 1) }}", "formats to a width"),
    ("{{ strftime_now('%999999999d') }}", "formats to a width"),
    ("{{ 'x'|indent(10**10) }}", "indents by more"),
    ("{{ 'x'|indent('x' * 9999) }}", "indents by more"),
    ("{{ [1]|tojson(indent=10**10) }}", "indents by more"),
    ("{{ 1.5|round(10**9, 'ceil') }}", "rounds to"),
    ("{{ 9**(9**9) }}", "integer of more than 4096 bits"),
    ("{{ 10**1000 * 10**1000 }}", "integer of more than 4096 bits"),
    ("{{ ('1' * 9999)|int(base=2) }}", "integer of more than 4096 bits"),
    ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    ("{{ " + MANY + "[1])|sum(start=[]) }}", "sum of a list"),
    ("{{ lipsum(10**6) }}", "'lipsum' is undefined"),
    (
      doubling(SET + "namespace(a=ns.s, b=ns.s) %}", "1", "ns.s"),
      "Namespace cannot be printed",
    ),
    ("{% block a %}{{ self.a() }}{% endblock %}", "RecursionError"),
    (
      "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
      "RecursionError",
    ),
  )
  def test_sizes(self, source, message):
    self._refused(source, message)


class LoadTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = make_folder(self)

  def _config(self, **config):
    (self.folder / "tokenizer_config.json").write_text(json.dumps(config))

  def test_folder(self):
    self._config(
      chat_template="{{ bos_token }}A{{ eos_token }}",
      bos_token={"content": "<s>", "lstrip": False},
      eos_token="</s>",
    )
    self.assertEqual(load_chat_template(self.folder).render(HELLO), "<s>A</s>")
    (self.folder / "chat_template.jinja").write_text("{{ bos_token }}B")
    self.assertEqual(load_chat_template(self.folder).render(HELLO), "<s>B")
    (self.folder / "tokenizer_config.json").unlink()
    self.assertEqual(load_chat_template(self.folder).render(HELLO), "B")

  def test_several_templates(self):
    named = [
      {"name": "tool_use", "template": "T"},
      {"name": "default", "template": "D"},
    ]
    self._config(chat_template=named)
    self.assertEqual(load_chat_template(self.folder).render(HELLO), "D")

  def test_gguf(self):
    file = write_gguf(
      self.folder / "model.gguf",
      [
        ("add_token_list", ["a", "<s>", "</s>"]),
        ("add_bos_token_id", 1),
        ("add_eos_token_id", 2),
        ("add_chat_template", "{{ bos_token }}G{{ eos_token }}"),
      ],
    )
    self.assertEqual(load_chat_template(file).render(HELLO), "<s>G</s>")

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, "has no chat template"):
      load_chat_template(self.folder)
    file = write_gguf(self.folder / "model.gguf")
    with self.assertRaisesRegex(ValueError, "has no chat template"):
      load_chat_template(file)
    with self.assertRaisesRegex(FileNotFoundError, "absent"):
      load_chat_template(self.folder / "absent")
    self._config(chat_template="{{")
    with self.assertRaisesRegex(ValueError, "chat template of '.*malformed"):
      load_chat_template(self.folder)
    (self.folder / "tokenizer_config.json").write_text("{")
    with self.assertRaisesRegex(ValueError, "tokenizer_config.json' is no JS"):
      load_chat_template(self.folder)

  def test_errors_name_the_checkpoint(self):
    self._config(chat_template="{{ 1 / 0 }}")
    with self.assertRaisesRegex(ValueError, str(self.folder)):
      load_chat_template(self.folder).render(HELLO)
    self.assertEqual(chat.load_chat_template(self.folder).source, "{{ 1 / 0 }}")


if __name__ == "__main__":
  absltest.main()

// yaml_test.cpp -- does the tree hold what the text says, and where it says it?
#include "io/yaml.h"

#include "memory/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using io::YamlNode;

namespace {

YamlNode scalar(const std::string& text) {
  YamlNode node;
  node.kind = YamlNode::scalar;
  node.text = text;
  return node;
}

}  // namespace

TEST_CASE("yaml keeps texts, order and lines", "[io][cpu]") {
  const auto root = io::parse_yaml(
      "run:\n"
      "  name: tiny   # why\n"
      "  lr: 3.0e-4\n"
      "\n"
      "layers: [4,\n"
      "  8]\n"
      "nothing:\n"
      "quoted: 'null'\n",
      "job.yaml");
  REQUIRE(root.kind == YamlNode::map);
  REQUIRE(root.entries.size() == 4);
  CHECK(root.entries[0].first == "run");
  CHECK(root.entries[3].first == "quoted");
  const auto* run = root.find("run");
  REQUIRE(run != nullptr);
  CHECK(run->key_line == 1);
  CHECK(run->find("lr")->text == "3.0e-4");
  CHECK(run->find("lr")->line == 3);
  CHECK(run->find("absent") == nullptr);
  const auto* layers = root.find("layers");
  REQUIRE(layers->items.size() == 2);
  CHECK(layers->items[1].text == "8");
  CHECK(layers->items[1].line == 6);
  CHECK(root.find("nothing")->kind == YamlNode::null);
  CHECK(root.find("nothing")->key_line == 7);
  CHECK(root.find("quoted")->kind == YamlNode::scalar);
  CHECK(root.find("quoted")->text == "null");
}

TEST_CASE("yaml written and parsed again is the same tree", "[io][cpu]") {
  YamlNode list, map, root;
  list.kind = YamlNode::list;
  for (const char* text :
       {"plain",  "",   "~",  "null", "-",  "---", "-5.0", "a: b", "# no comment", "two\nlines\n", "tab\there", "\"q\\",    "é",
        " edge ", "[1", "*a", "&b",   "!t", "%d",  "@x",   "'",    "yes",          "0x1f",         "key:",      "\x01\x7f", "<<"})
    list.items.push_back(scalar(text));
  YamlNode empty_list, empty_map, null, nested;
  empty_list.kind = YamlNode::list;
  empty_map.kind = YamlNode::map;
  nested.kind = YamlNode::list;
  nested.items = {list, empty_list, empty_map, null};
  map.kind = YamlNode::map;
  map.entries = {{"a.b/c", scalar("1")}, {"odd key: ", nested}, {"null", null}, {"", empty_map}};
  list.items.push_back(map);
  root.kind = YamlNode::map;
  root.entries = {{"list", list}, {"map", map}, {"last", scalar("x")}};
  const std::string text = io::to_yaml(root);
  INFO(text);
  CHECK(io::parse_yaml(text, "again") == root);
  CHECK(io::parse_yaml(io::to_yaml(list), "again") == list);
  CHECK(io::parse_yaml(io::to_yaml(scalar("one: two")), "again") == scalar("one: two"));
  CHECK_FALSE(io::parse_yaml("a: 1", "x") == io::parse_yaml("a: 2", "x"));
  CHECK_FALSE(io::parse_yaml("a: [1, 2]", "x") == io::parse_yaml("a: [2, 1]", "x"));
}

TEST_CASE("yaml faults name the file and the line and blame the job", "[io][cpu]") {
  const auto fault = [](const std::string& text) { return test::error_of([&] { io::parse_yaml(text, "job.yaml"); }); };
  CHECK(fault("a: 1\nb: 2\na: 3\n") == "2: job.yaml:3: key a is given twice (first in line 1)");
  CHECK(test::contains(fault("a: 1\nb: [1, 2\n"), "2: job.yaml:"));
  CHECK(test::contains(fault("a: 1\n b: 2\n"), "2: job.yaml:2: "));
  for (const char* text : {"a:\n\t- 1\n", "a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n", "a:\n \tb: {c: 1}\n"}) {
    CAPTURE(text);
    CHECK(test::contains(fault(text), ": a tab in the indentation; YAML takes only spaces"));
  }
  CHECK(test::contains(fault("x: 1\na: " + std::string(5000, '[')), "2: job.yaml:2: values inside values, more than "));
  CHECK(
      test::contains(fault("x: 1\na: *\n"), "2: job.yaml:2: alias not found after *; a text that begins with * stands in quotes"));
  CHECK(test::contains(fault("x: 1\na: *b\n"), "; a text that begins with * stands in quotes"));
  CHECK(test::contains(fault("? [x]\n: 1\n"), "2: job.yaml:1: a key must be"));
  CHECK(test::contains(fault("a: 1\n---\nb: 2\n"), "2: job.yaml:2: a second document"));
  CHECK(test::contains(fault("a: &x [*x]\n"), "2: job.yaml:1: an alias stands inside"));
  CHECK(
      test::contains(test::error_of([] { io::read_yaml("no/such/job.yaml"); }), "2: no/such/job.yaml: cannot open: No such file"));
}

TEST_CASE("what is wrong with a text does not hide the rest of it, unless its syntax breaks off", "[io][cpu]") {
  std::vector<io::YamlFault> faults;
  const auto tree = io::parse_yaml(
      "a: {k: 1, l: 2}\n"  // 1
      "? [x]\n"            // 2
      ": 1\n"              // 3
      "a: {k: 3, m: 4}\n"  // 4
      "b: &x [5, *x]\n"    // 5
      "c: 6\n"             // 6
      "---\n"              // 7
      "d: 7\n",            // 8
      faults);
  std::string lines;
  for (const auto& f : faults) lines += std::to_string(f.line) + " " + f.text + "\n";
  CHECK(lines ==
        "2 a key must be a plain text\n"
        "4 key a is given twice (first in line 1)\n"
        "4 key k is given twice (first in line 1)\n"
        "5 an alias stands inside the value it repeats\n"
        "7 a second document; one is expected\n");
  REQUIRE(tree.has_value());
  CHECK(tree->find("a")->find("k")->text == "1");
  CHECK(tree->find("a")->find("m")->text == "4");
  CHECK(tree->find("b")->items.size() == 2);
  CHECK(tree->find("c")->text == "6");
  CHECK(tree->find("d") == nullptr);
  faults.clear();
  CHECK_FALSE(io::parse_yaml("a: 1\na: 2\nb: [\n", faults).has_value());
  REQUIRE(faults.size() == 2);
  CHECK(faults[0].text == "key a is given twice (first in line 1)");
}

TEST_CASE("yaml aliases repeat what they name and an empty text is null", "[io][cpu]") {
  const auto root = io::parse_yaml("a: &x {k: 1}\nb: *x\n", "job.yaml");
  CHECK(*root.find("a") == *root.find("b"));
  CHECK(root.find("b")->find("k")->text == "1");
  CHECK(root.find("b")->key_line == 2);
  CHECK(io::parse_yaml("", "x").kind == YamlNode::null);
  CHECK(io::parse_yaml("# only a comment\n", "x").kind == YamlNode::null);
  CHECK(io::parse_yaml("\xEF\xBB\xBF"
                       "a: 1\r\nb: 2\r\n",
                       "x")
            .find("b")
            ->text == "2");
}

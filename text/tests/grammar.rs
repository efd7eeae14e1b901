//! Grammars over SmolLM2's vocabulary: answers of random tokens that were allowed, held against what they had to match.

mod common;

use baton_text::answer::{AnswerFormat, AnswerParser, CallFormat, Part};
use baton_text::grammar::{CompiledGrammar, GrammarCompiler, GrammarState, STACK_BYTES, check};
use baton_text::{Specials, Tokenizer};
use baton_types::{CallGrammar, CallsGrammar, Grammar, GrammarPiece, TokenId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::sync::LazyLock;

const END: TokenId = 2;
/// As the logits of some models, more than the tokenizer has.
const VOCAB: usize = 49_152 + 5;

static MODEL: LazyLock<(Tokenizer, GrammarCompiler)> = LazyLock::new(|| {
    let tokenizer = common::tokenizer("smollm");
    let compiler = GrammarCompiler::new(&tokenizer, VOCAB, &[0, END]).unwrap();
    (tokenizer, compiler)
});

fn compile(grammar: &Grammar) -> CompiledGrammar {
    check(grammar).unwrap_or_else(|error| panic!("{grammar:?}: {error}"));
    MODEL.1.compile(grammar).unwrap()
}

fn compile_for_model(grammar: &Grammar) -> CompiledGrammar {
    MODEL.1.compile(grammar).unwrap()
}

fn schema(schema: Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

fn allowed(state: &mut GrammarState) -> Vec<TokenId> {
    let words = state.allowed().unwrap();
    (0..VOCAB as TokenId).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// A random answer, and its tokens. Where it may end it mostly does, and short tokens come first: it would hardly ever end.
fn answer(grammar: &CompiledGrammar, seed: u64) -> (String, Vec<TokenId>) {
    let (mut random, mut state, mut tokens) = (StdRng::seed_from_u64(seed), grammar.start(), Vec::new());
    for step in 0..4000 {
        let allowed = allowed(&mut state);
        let ends = allowed.contains(&END);
        if ends && (allowed.len() <= 2 || random.random_bool(0.5)) {
            return (MODEL.0.decode(&tokens, true), tokens);
        }
        assert!(allowed.iter().all(|id| !MODEL.0.is_special(*id) || [0, END].contains(id)));
        let text: Vec<TokenId> = allowed.into_iter().filter(|id| ![0, END].contains(id)).collect();
        // Later on, what closes.
        let closing = |id: &&TokenId| {
            let bytes = MODEL.0.token_bytes(**id).unwrap();
            step > 40 && bytes.iter().all(|byte| b"\"}]0123456789".contains(byte)) && bytes.len() < 4
        };
        let closes: Vec<TokenId> = text.iter().filter(closing).copied().collect();
        let of = if closes.is_empty() { &text } else { &closes };
        let token = of[random.random_range(0..of.len())];
        state.advance(&[token]).unwrap();
        tokens.push(token);
    }
    panic!("{:?} goes on", MODEL.0.decode(&tokens, true));
}

#[test]
fn random_answers_match_their_grammar() {
    let list = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        value.as_array().unwrap().iter().all(|item| item["a"].as_i64().is_some_and(|a| (3..=7).contains(&a)))
    };
    let person = json!({
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 7}, "b": {"enum": ["x\ny", "z", 1.5, null]}},
        "required": ["a"],
        "additionalProperties": false
    });
    let tree = json!({
        "$defs": {"node": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}]}},
        "$ref": "#/$defs/node"
    });
    type Matches = fn(&str) -> bool;
    let cases: [(Grammar, Matches); 7] = [
        (schema(json!({"type": "array", "items": person, "minItems": 1, "maxItems": 3})), list),
        (schema(tree), |text| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_boolean() || v.is_array())),
        (schema(json!({"type": "object"})), |text| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object())),
        (Grammar::JsonSchema("true".into()), |text| serde_json::from_str::<Value>(text).is_ok()),
        (Grammar::Regex(r"[a-c]{2,5}/[0-9]+(é|\n)".into()), |text| {
            let text = text.strip_suffix('é').or(text.strip_suffix('\n')).unwrap();
            let (letters, digits) = text.split_once('/').unwrap();
            (2..=5).contains(&letters.len())
                && letters.bytes().all(|b| b"abc".contains(&b))
                && digits.parse::<f64>().is_ok()
        }),
        (Grammar::Choice(vec!["yes".into(), "no\n\"ok\"/\u{1}".into(), "日本".into()]), |text| {
            ["yes", "no\n\"ok\"/\u{1}", "日本"].contains(&text)
        }),
        (Grammar::Lark("start: sum\nsum: NUMBER (\"+\" NUMBER)*\nNUMBER: /[0-9]{1,3}/".into()), |text| {
            text.split('+').all(|n| (1..=3).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()))
        }),
    ];
    for (grammar, matches) in cases {
        let compiled = compile(&grammar);
        for seed in 0..20 {
            let (text, _) = answer(&compiled, seed);
            assert!(matches(&text), "{grammar:?}: {text:?}");
        }
    }
}

#[test]
fn calls_are_of_their_tools() {
    let text = |text: &str| GrammarPiece::Text(text.to_owned());
    let of = |name: &str, schema: Value| CallGrammar {
        open: vec![text(&format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "))],
        schema: schema.to_string(),
        close: vec![text("}\n</tool_call>")],
    };
    let get = of(
        "get",
        json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"], "additionalProperties": false}),
    );
    let put = of("put", json!({"type": "object", "properties": {}, "additionalProperties": false}));
    let grammar = |separator: Option<&str>| {
        let (calls, separator) = (vec![get.clone(), put.clone()], separator.map(|separator| vec![text(separator)]));
        compile(&Grammar::Calls(CallsGrammar { open: vec![], calls, separator, close: vec![] }))
    };
    let format = AnswerFormat { calls: CallFormat::Hermes, shows_tools: true, reasons: false };
    let (one, several) = (grammar(None), grammar(Some("\n")));
    let mut most = 0;
    for seed in 0..40 {
        for (compiled, max) in [(&one, 1), (&several, 99)] {
            let (text, _) = answer(compiled, seed);
            let mut parser = AnswerParser::new(format, ["get".to_owned(), "put".to_owned()].into(), "");
            let parts: Vec<Part> = parser.push(&text).into_iter().chain(parser.finish()).collect();
            assert!(!parts.is_empty() && parts.len() <= max, "{text:?}");
            most = most.max(parts.len());
            for part in parts {
                let Part::Call(call) = part else { panic!("{text:?}") };
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                let n = arguments["n"].as_i64();
                assert!(if call.name == "get" {
                    n.is_some_and(|n| (1..=9).contains(&n))
                } else {
                    arguments == json!({})
                });
            }
        }
    }
    assert!(most > 1);
    // A control token opens it.
    let calls = CallsGrammar {
        open: vec![GrammarPiece::Token(1), text(" [")],
        calls: vec![put.clone()],
        separator: None,
        close: vec![text("]")],
    };
    let mut state = compile_for_model(&Grammar::Calls(calls)).start();
    assert_eq!(allowed(&mut state), [1]);
}

#[test]
fn a_state_follows_from_the_tokens_alone() {
    let grammar =
        schema(json!({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}));
    let compiled = compile(&grammar);
    for seed in 0..10 {
        let (text, tokens) = answer(&compiled, seed);
        let mut one_by_one = compiled.start();
        for at in 0..tokens.len() {
            // Elsewhere, with nothing learned, all at once.
            let mut rebuilt = MODEL.1.compile(&grammar).unwrap().start();
            rebuilt.advance(&tokens[..at]).unwrap();
            assert_eq!(rebuilt.allowed().unwrap(), one_by_one.allowed().unwrap(), "{text:?} at {at}");
            one_by_one.advance(&tokens[at..=at]).unwrap();
        }
    }
}

#[test]
fn a_token_that_is_not_allowed_is_refused() {
    let mut state = compile(&Grammar::Choice(vec!["yes".into()])).start();
    let no = MODEL.0.encode("no", baton_text::Specials::AsText).unwrap();
    assert!(state.advance(&no).is_err());
    // The text of a control token is text.
    let mut state = compile(&Grammar::Regex("<\\|im_end\\|>".into())).start();
    assert!(!allowed(&mut state).contains(&END));
}

#[test]
fn wrong_grammars_are_told() {
    let long = "a?".repeat(Grammar::PATTERN_BYTES_MAX / 2 / 4);
    let properties: serde_json::Map<String, Value> =
        (0..5).map(|i| (format!("p{i}"), json!({"type": "string", "pattern": long}))).collect();
    let counted = |count: usize, by: &str| {
        let properties: serde_json::Map<_, _> =
            (0..count).map(|i| (format!("p{i}"), json!({"type": "null"}))).collect();
        schema(json!({"type": "object", "properties": properties, by: 1}))
    };
    for (grammar, part) in [
        (Grammar::JsonSchema("false".into()), "allows no value"),
        (Grammar::JsonSchema("[]".into()), "must be an object or `true`"),
        (Grammar::JsonSchema("{".into()), "must be JSON"),
        (schema(json!({"type": "strong"})), "strong"),
        (schema(json!({"not": {"type": "string"}})), "not"),
        (schema(json!({"$ref": "http://127.0.0.1:9/schema.json"})), "127.0.0.1:9"),
        (
            schema(json!({"type": "object", "properties": properties})),
            "patterns of a JSON schema take at most 8192 bytes",
        ),
        (schema(json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})), "NoExtensionBias"),
        (counted(33, "minProperties"), "at most 32 properties where minProperties or maxProperties count them"),
        (counted(33, "maxProperties"), "at most 32 properties where minProperties or maxProperties count them"),
        (schema(json!({"type": "integer", "minimum": 2, "maximum": 1})), "minimum"),
        (Grammar::Regex("(".into()), "regex"),
        (Grammar::Lark("start: (".into()), "Expected token"),
        (Grammar::Lark("begin: \"a\"".into()), "start"),
        (Grammar::Choice(vec![]), "1 to 4096 texts"),
    ] {
        let error = check(&grammar).expect_err("wrong").to_string();
        assert!(error.contains(part) && error.len() < 700, "{grammar:?}: {error}");
    }
}

/// These took seconds to minutes of a core, and up to gigabytes.
#[test]
fn what_takes_too_much_work_is_refused_by_name() {
    let many = |count: usize| (0..count).map(|i| format!("p{i}")).collect::<Vec<_>>();
    let divisor = |of: u64| json!({"type": "integer", "multipleOf": of});
    let divisors: Vec<Value> = (0..100).map(|i| divisor(9999 - i)).collect();
    let patterns: serde_json::Map<_, _> = (0..300).map(|i| (format!("^{i}_.*$"), json!({}))).collect();
    let lark = |schema: &Value| Grammar::Lark(format!("start: \"a\" | value\nvalue: %json {schema}\n"));
    for (of, part) in [
        (divisor(99_991), "`multipleOf` takes too much work"),
        (json!({"anyOf": divisors}), "`multipleOf` takes too much work"),
        (json!({"allOf": [divisor(97), divisor(89), divisor(83)]}), "`multipleOf` takes too much work"),
        (json!({"default": divisor(99_991), "$ref": "#/default"}), "`multipleOf` takes too much work"),
        (
            json!({"x-guidance": {"lenient": true}, "default": divisor(99_991), "$ref": "#/default"}),
            "`multipleOf` takes too much work",
        ),
        (json!({"type": "object", "required": many(1_001)}), "at most 1000 properties"),
        (json!({"type": "object", "patternProperties": patterns}), "at most 32 patternProperties"),
    ] {
        let call = CallGrammar { open: vec![], schema: of.to_string(), close: vec![] };
        let calls = CallsGrammar { open: vec![], calls: vec![call], separator: None, close: vec![] };
        for grammar in [schema(of.clone()), lark(&of), Grammar::Calls(calls)] {
            if grammar.check().is_err() {
                continue;
            }
            let error = check(&grammar).expect_err("it takes seconds").to_string();
            assert!(error.contains(part), "{grammar:?}: {error}");
        }
    }
    // Tools count together.
    let call = CallGrammar { open: vec![], schema: divisor(9_000).to_string(), close: vec![] };
    let calls = |count| CallsGrammar { open: vec![], calls: vec![call.clone(); count], separator: None, close: vec![] };
    assert!(check(&Grammar::Calls(calls(1))).is_ok() && check(&Grammar::Calls(calls(2))).is_err());
    assert!(check(&Grammar::Lark("start: %json {".into())).unwrap_err().to_string().contains("%json"));
    for taken in [
        json!({"type": "object", "properties": {"a": divisor(3_333), "b": {"type": "number", "multipleOf": 0.01}}}),
        json!({"x-guidance": {"lenient": true}, "anyOf": divisors}),
        json!({"type": "object", "properties": {"multipleOf": divisor(5)}, "required": many(1_000)}),
    ] {
        check(&schema(taken)).unwrap();
    }
    // What is left out of a lenient schema is no data.
    let value = json!({"multipleOf": 5});
    let lenient = json!({"x-guidance": {"lenient": true}, "enum": [value], "$defs": {"enum": {"anyOf": divisors}}});
    let (text, _) = answer(&compile(&schema(lenient)), 1);
    assert_eq!(text.parse::<Value>().unwrap(), value);
}

/// From 2^53 on, an integer and its neighbours are one number to llguidance.
#[test]
fn inexact_bounds_are_refused_by_name() {
    let refused = |text: &str| {
        let error = check(&Grammar::JsonSchema(text.into())).expect_err(text).to_string();
        error.split('`').nth(1).unwrap_or_else(|| panic!("{text}: {error}")).to_owned()
    };
    for keyword in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"] {
        for bound in ["9007199254740992", "18446744073709551615", "-9007199254740993", "9007199254740993.0", "1e20"] {
            let integer = format!(r#"{{"type": "integer", "{keyword}": {bound}}}"#);
            for schema in [
                integer.clone(),
                format!(r#"{{"properties": {{"a": {integer}}}}}"#),
                format!(r#"{{"properties": {{"default": {integer}}}}}"#),
                format!(r#"{{"anyOf": [{{"type": "null"}}, {integer}]}}"#),
                format!(r##"{{"$defs": {{"enum": {integer}}}, "$ref": "#/$defs/enum"}}"##),
                format!(r##"{{"definitions": {{"enum": {integer}}}, "$ref": "#/definitions/enum"}}"##),
                format!(r#"{{"patternProperties": {{"default": {integer}}}}}"#),
                format!(r##"{{"elsewhere": {{"a": {integer}}}, "$ref": "#/elsewhere/a"}}"##),
            ] {
                assert_eq!(refused(&schema), keyword, "{schema}");
            }
        }
    }
    let call = CallGrammar { open: vec![], schema: r#"{"maximum": 1e20}"#.into(), close: vec![] };
    let calls = CallsGrammar { open: vec![], calls: vec![call], separator: None, close: vec![] };
    assert!(check(&Grammar::Calls(calls)).unwrap_err().to_string().contains("`maximum`"));
    let lenient = r#"start: %json {"x-guidance": {"lenient": true}, "maximum": 1e20}"#;
    assert!(check(&Grammar::Lark(lenient.into())).unwrap_err().to_string().contains("`maximum`"));
}

#[test]
fn large_numbers_that_bound_nothing_are_taken() {
    let large = 9_007_199_254_740_993_u64;
    for taken in [
        json!({"type": "integer", "minimum": -9_007_199_254_740_991_i64, "maximum": 9_007_199_254_740_991_i64}),
        json!({"type": "object", "properties": {"minimum": {"type": "integer"}, "multipleOf": {"const": large}}}),
        json!({"enum": [{"maximum": large}, large]}),
        json!({"const": {"minimum": large}}),
        json!({"type": "integer", "default": {"minimum": large}, "examples": [{"maximum": large}]}),
    ] {
        compile(&schema(taken));
    }
    let exact = compile(&schema(
        json!({"type": "integer", "minimum": 9_007_199_254_740_990_i64, "maximum": 9_007_199_254_740_991_i64}),
    ));
    for seed in 0..8 {
        let (text, _) = answer(&exact, seed);
        assert!(["9007199254740990", "9007199254740991"].contains(&text.as_str()), "{text}");
    }
    // Where what cannot be enforced does not count, neither does such a bound.
    let mut lenient = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": large}}});
    baton_text::grammar::lenient(lenient.as_object_mut().unwrap());
    compile(&schema(lenient));
}

/// Each is as large as it may be, and goes on at a model's first token in all ways.
#[test]
fn the_widest_grammars_are_followed() {
    let texts = (0..Grammar::CHOICES_MAX).map(|at| format!("{at:04}")).collect();
    let properties: serde_json::Map<_, _> =
        (0..1000).map(|at| (format!("p{at:03}"), json!({"type": "integer"}))).collect();
    let object = schema(json!({"type": "object", "properties": properties, "additionalProperties": false}));
    for (grammar, begins) in [(Grammar::Choice(texts), ""), (object, "{\"")] {
        check(&grammar).unwrap();
        let mut state = compile(&grammar).start();
        state.advance(&MODEL.0.encode(begins, Specials::AsText).unwrap()).unwrap();
        assert!(!allowed(&mut state).is_empty());
    }
}

/// Each of these took the process down, minutes or gigabytes, with larger bounds or on a usual stack.
#[test]
fn hostile_grammars_end() {
    let chain = |link: fn(usize) -> String, last: &str| {
        let mut text = String::from("start: r0\n");
        let links = (0..).map(link).take_while(|link| {
            text.push_str(link);
            text.len() < Grammar::PATTERN_BYTES_MAX - 64
        });
        let last = last.replace("N", &links.count().to_string());
        Grammar::Lark(text + &last)
    };
    let references = |link: fn(usize) -> Value| {
        let (mut links, mut bytes) = (serde_json::Map::new(), 0);
        for at in 0.. {
            let value = link(at + 1);
            bytes += value.to_string().len() + 12;
            if bytes > Grammar::SCHEMA_BYTES_MAX - 100 {
                links.insert(at.to_string(), json!({"type": "integer"}));
                break;
            }
            links.insert(at.to_string(), value);
        }
        schema(json!({"a": links, "$ref": "#/a/0"}))
    };
    let cases = [
        Grammar::Regex("a*".repeat(Grammar::PATTERN_BYTES_MAX / 2)),
        Grammar::Regex("(a|b)?".repeat(Grammar::PATTERN_BYTES_MAX / 6)),
        Grammar::Regex("(".repeat(4000) + &")".repeat(4000)),
        Grammar::Regex("((a{1000}){1000}){1000}".into()),
        chain(|i| format!("r{i}: r{}\n", i + 1), "rN: \"a\"\n"),
        chain(|i| if i == 0 { "r0: R1\n".into() } else { format!("R{i}: R{}*\n", i + 1) }, "RN: \"a\"\n"),
        references(|to| json!({"$ref": format!("#/a/{to}")})),
        references(|to| json!({"items": {"$ref": format!("#/a/{to}")}})),
        references(|to| json!({"properties": {"x": {"$ref": format!("#/a/{to}")}}})),
        schema(json!({"type": "array", "minItems": 10_000_000})),
        schema(json!({"type": "string", "maxLength": 100_000_000})),
        schema(json!({"type": "integer", "multipleOf": 9999})),
    ];
    for grammar in cases {
        let told = check(&grammar);
        // Whatever was told: a worker that gets it survives as well.
        let follow = || {
            let Ok(compiled) = MODEL.1.compile(&grammar) else { return };
            let mut state = compiled.start();
            for _ in 0..20 {
                let Ok(words) = state.allowed() else { return };
                let at = words.iter().position(|word| *word != 0).unwrap();
                if state.advance(&[at as u32 * 32 + words[at].trailing_zeros()]).is_err() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, follow).unwrap();
            thread.join().unwrap_or_else(|_| panic!("{told:?}"));
        });
    }
}

#[test]
fn a_model_without_an_end_has_no_grammars() {
    assert!(GrammarCompiler::new(&MODEL.0, VOCAB, &[]).is_err());
    assert!(GrammarCompiler::new(&MODEL.0, VOCAB, &[VOCAB as TokenId]).is_err());
}

#[test]
fn tokens_by_number_are_refused_and_their_texts_taken_as_the_error_says() {
    let lark = |told: &str| Grammar::Lark(told.into());
    for refused in ["start: <[2]>", r#"start: "<[""#, "start: /<[a-z]/"] {
        let error = check(&lark(refused)).expect_err(refused).to_string();
        assert!(error.contains("tokens by number"), "{error}");
    }
    let (text, _) = answer(&compile(&lark(r#"start: "<" "[" "a" "]""#)), 1);
    assert_eq!(text, "<[a]");
    let (text, _) = answer(&compile(&lark("start: /[<][a]/")), 1);
    assert_eq!(text, "<a");
}

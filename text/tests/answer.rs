//! Parts of answers, in any pieces.

use baton_text::answer::{AnswerFormat, AnswerParser, Call, CallFormat, NotationPart, Part};
use proptest::prelude::*;
use std::sync::Arc;

const HERMES: AnswerFormat = AnswerFormat { calls: CallFormat::Hermes, shows_tools: true, reasons: true };
const LLAMA: AnswerFormat = AnswerFormat { calls: CallFormat::Llama, shows_tools: true, reasons: false };
const MISTRAL_ARGS: AnswerFormat = AnswerFormat { calls: CallFormat::MistralArgs, shows_tools: true, reasons: false };
const GRANITE: AnswerFormat = AnswerFormat { calls: CallFormat::Granite, shows_tools: true, reasons: false };
const MISTRAL: AnswerFormat = AnswerFormat { calls: CallFormat::Mistral, shows_tools: true, reasons: false };

const DEEPSEEK: AnswerFormat = AnswerFormat { calls: CallFormat::DeepSeek, shows_tools: true, reasons: true };
const DEEPSEEK_BARE: AnswerFormat = AnswerFormat { calls: CallFormat::DeepSeekBare, shows_tools: true, reasons: true };
const HARMONY: AnswerFormat = AnswerFormat { calls: CallFormat::Harmony, shows_tools: true, reasons: false };

fn parser(format: AnswerFormat, prompt: &str) -> AnswerParser {
    AnswerParser::new(format, Arc::from(["get".to_owned(), "put".to_owned()]), prompt)
}

/// Neighbours of one kind as one part, and whether there were calls.
fn parts(mut parser: AnswerParser, pieces: &[&str]) -> (Vec<Part>, bool) {
    let mut all: Vec<Part> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    let mut joined: Vec<Part> = Vec::new();
    for part in all {
        match (joined.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more)) | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => {
                text.push_str(&more);
            }
            (_, part) => joined.push(part),
        }
    }
    (joined, parser.has_calls())
}

fn content(text: &str) -> Part {
    Part::Content(text.into())
}

fn call(name: &str, arguments: &str) -> Part {
    Part::Call(Call { name: name.into(), arguments: arguments.into() })
}

#[track_caller]
fn check(format: AnswerFormat, prompt: &str, text: &str, expected: &[Part]) {
    let characters: Vec<&str> = text.split_inclusive(|_| true).collect();
    for pieces in [&[text][..], &characters] {
        let (parts, has_calls) = parts(parser(format, prompt), pieces);
        assert_eq!(parts, expected, "{text:?}");
        assert_eq!(has_calls, parts.iter().any(|part| matches!(part, Part::Call(_))));
    }
}

#[test]
fn hermes() {
    let one = "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>";
    let get = || call("get", "{\"a\": [1, \"}\"]}");
    check(HERMES, "", one, &[get()]);
    check(HERMES, "", &format!("\n {one}\n{one} \n"), &[get(), get()]);
    check(HERMES, "", &format!("Let me see.\n{one}\nSo."), &[content("Let me see.\n"), get(), content("So.")]);
    let inside = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": \"</tool_call>\"}}</tool_call>";
    check(HERMES, "", inside, &[call("get", "{\"a\": \"</tool_call>\"}")]);
    let many = |marks: usize| format!("{{\"a\": \"{}\"}}", "</tool_call>".repeat(marks));
    let inside = format!("<tool_call>{{\"name\": \"get\", \"arguments\": {}}}</tool_call>", many(64));
    check(HERMES, "", &inside, &[call("get", &many(64))]);
    let inside = format!("<tool_call>{{\"name\": \"get\", \"arguments\": {}}}</tool_call>", many(65));
    check(HERMES, "", &inside, &[content(&inside)]);
    // That is the limit of each call.
    let one = format!("<tool_call>{{\"name\": \"get\", \"arguments\": {}}}</tool_call>", many(2));
    check(HERMES, "", &one.repeat(33), &vec![call("get", &many(2)); 33]);
    check(HERMES, "", "a < b <tool", &[content("a < b <tool")]);
    check(HERMES, "", "\n\nplain \n", &[content("\n\nplain \n")]);
    check(HERMES, "", " \n", &[]);
    let text = "<tool_call>{\"name\": \"get\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>";
    check(HERMES, "", text, &[call("get", "{\"a\": 1}")]);
    for no_call in [
        "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"get\", \"arguments\": [1]}</tool_call> and more",
        "<tool_call>{\"name\": \"get\"}</tool_call>",
        "<tool_call>get</tool_call>",
        "<tool_call>\n{\"name\": \"get\", \"argum",
    ] {
        check(HERMES, "", no_call, &[content(no_call)]);
    }
}

#[test]
fn reasoning() {
    let thought = |text: &str| Part::Reasoning(text.into());
    check(HERMES, "", "<think>\na </thin\n</think>\n\nb", &[thought("\na </thin\n"), content("b")]);
    check(HERMES, "<assistant>\n<think>\n", "a</think>b", &[thought("a"), content("b")]);
    check(HERMES, "<think>\n\n</think>\n\n", "b </think>", &[content("b </think>")]);
    check(HERMES, "", "<think>cut off", &[thought("cut off")]);
    check(HERMES, "", "<thin", &[content("<thin")]);
    check(HERMES, "", "b <think>a</think>", &[content("b <think>a</think>")]);
    let calls = "<think>a</think>\n<tool_call>{\"name\": \"put\", \"arguments\": {}}</tool_call>";
    check(HERMES, "", calls, &[thought("a"), call("put", "{}")]);
    check(MISTRAL, "<think>", "<think>a</think>", &[content("<think>a</think>")]);
}

#[test]
fn llama() {
    check(LLAMA, "", "{\"name\": \"get\", \"parameters\": {\"a\": \";\"}}", &[call("get", "{\"a\": \";\"}")]);
    let two = "{\"name\": \"get\", \"parameters\": {}}; {\"name\": \"put\", \"parameters\": {\"x\": 1}}\n";
    check(LLAMA, "", two, &[call("get", "{}"), call("put", "{\"x\": 1}")]);
    for no_call in
        ["{\"a\": 1}", "{\"name\": \"get\", \"parameters\": {}} so", "Hi {\"name\": \"get\", \"parameters\": {}}", "{"]
    {
        check(LLAMA, "", no_call, &[content(no_call)]);
    }
}

#[test]
fn mistral() {
    let calls = "[TOOL_CALLS] [{\"name\": \"get\", \"arguments\": {}}, {\"name\": \"put\", \"arguments\": {\"x\": 1}, \"id\": \"a\"}]";
    check(MISTRAL, "", calls, &[call("get", "{}"), call("put", "{\"x\": 1}")]);
    check(MISTRAL, "", &format!("So: {calls}"), &[content("So: "), call("get", "{}"), call("put", "{\"x\": 1}")]);
    for no_call in ["[TOOL_CALLS] []", "[TOOL_CALLS] [{\"name\": \"get\"", "[TOOL"] {
        check(MISTRAL, "", no_call, &[content(no_call)]);
    }
    let calls = "[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{\"a\": \"[TOOL_CALLS]\"} [TOOL_CALLS]put[ARGS] {\"x\": 1}\n";
    let both = [call("get", "{\"a\": \"[TOOL_CALLS]\"}"), call("put", "{\"x\": 1}")];
    check(MISTRAL_ARGS, "", calls, &both);
    for no_call in
        ["[TOOL_CALLS]get", "[TOOL_CALLS]get[ARGS]7", "[TOOL_CALLS]get[ARGS]{}{}", "[TOOL_CALLS]other[ARGS]{}"]
    {
        check(MISTRAL_ARGS, "", no_call, &[content(no_call)]);
    }
    let granite = "<|tool_call|>[{\"name\": \"get\", \"arguments\": {}}]";
    check(GRANITE, "", granite, &[call("get", "{}")]);
}

#[test]
fn deepseek() {
    let (open, close) = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>");
    let old = |name: &str, arguments: &str| {
        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>")
    };
    let new = |name: &str, arguments: &str| {
        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    };
    let calls = [call("get", "{\"a\": \"```\"}"), call("put", "{}")];
    let text = format!("{open}{}\n{}{close}", old("get", "{\"a\": \"```\"}"), old("put", "{}"));
    check(DEEPSEEK, "", &text, &calls);
    let text = format!("So.{open}{}{}{close}", new("get", "{\"a\": \"```\"}"), new("put", "{}"));
    let [get, put] = calls;
    check(DEEPSEEK_BARE, "", &text, &[content("So."), get, put]);
    check(DEEPSEEK_BARE, "<think>", "a</think>b", &[Part::Reasoning("a".into()), content("b")]);
    for no_call in [
        format!("{open}{close}"),
        format!("{open}{}", new("get", "{}")),
        format!("{open}{}{close}", new("other", "{}")),
        format!("{open}{}{close}", new("get", "1")),
        format!("{open}{} and{close}", new("get", "{}")),
    ] {
        check(DEEPSEEK_BARE, "", &no_call, &[content(&no_call)]);
        check(DEEPSEEK, "", &no_call, &[content(&no_call)]);
    }
}

#[test]
fn harmony() {
    let thought = |text: &str| Part::Reasoning(text.into());
    let prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
    let analysis = "<|channel|>analysis<|message|>Hm <|en";
    let last = "<|start|>assistant<|channel|>final<|message|>It is.";
    let whole = format!("{analysis}.<|end|>{last}");
    check(HARMONY, prompt, &whole, &[thought("Hm <|en."), content("It is.")]);
    check(HARMONY, prompt, &format!("{whole}<|return|>"), &[thought("Hm <|en."), content("It is.")]);
    // An end that is missing, as where the answer was cut off and goes on.
    check(HARMONY, prompt, &format!("{analysis}{last}"), &[thought("Hm <|en"), content("It is.")]);
    check(HARMONY, prompt, analysis, &[thought("Hm <|en")]);

    let get = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{\"a\": \"<|\"}";
    let reasoned = format!("<|channel|>analysis<|message|>I get it.<|end|><|start|>assistant{get}<|call|>");
    check(HARMONY, prompt, &reasoned, &[thought("I get it."), call("get", "{\"a\": \"<|\"}")]);
    check(HARMONY, prompt, get, &[call("get", "{\"a\": \"<|\"}")]);
    // The recipient may come first.
    let first = " to=functions.put<|channel|>commentary json<|message|>{}<|call|>";
    check(HARMONY, prompt, first, &[call("put", "{}")]);
    check(HARMONY, "", &format!("<|start|>assistant{first}"), &[call("put", "{}")]);
    let preamble = format!("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{get}<|call|>");
    check(HARMONY, prompt, &preamble, &[content("I look."), call("get", "{\"a\": \"<|\"}")]);
    for no_call in [
        "<|channel|>commentary to=functions.other<|message|>{}",
        "<|channel|>commentary to=python<|message|>1 + 1",
        "<|channel|>analysis to=python<|message|>1 + 1",
        "<|channel|>commentary to=functions.get<|message|>[1]",
        "<|channel|>commentary to=functions.get<|message|>{\"a\"",
        "No header at all",
        "assistants say so",
        "a <|message|> in the text",
    ] {
        check(HARMONY, prompt, no_call, &[content(no_call)]);
    }
    // Half of a header says nothing, a word is one, and a prompt may have begun the message.
    check(HARMONY, prompt, "<|channel|>fin", &[]);
    check(HARMONY, prompt, "assist", &[content("assist")]);
    check(HARMONY, prompt, " to=", &[content(" to=")]);
    let open = format!("{prompt}<|channel|>final<|message|>");
    check(HARMONY, &open, "{\"a\": 1}", &[content("{\"a\": 1}")]);
    let open = format!("{prompt}<|channel|>analysis<|message|>Hm");
    check(
        HARMONY,
        &open,
        " so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        &[thought(" so"), content("Yes")],
    );
}

#[test]
fn notations_are_written_as_they_are_read() {
    for format in [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GRANITE, DEEPSEEK, DEEPSEEK_BARE, HARMONY] {
        let (open, separator, close) = format.calls.around_calls();
        let one = |name: &str| {
            let (before, after) = format.calls.around_arguments(name);
            format!("{before}{{\"x\": 1}}{after}")
        };
        let text = format!("{open}{}{close}", one("get"));
        check(format, "", &text, &[call("get", "{\"x\": 1}")]);
        if let Some(separator) = separator {
            let text = format!("{open}{}{separator}{}{close}", one("get"), one("put"));
            check(format, "", &text, &[call("get", "{\"x\": 1}"), call("put", "{\"x\": 1}")]);
        }
        let parts = format.calls.parts(&text);
        let joined: String = parts
            .iter()
            .map(|part| match part {
                NotationPart::Text(text) | NotationPart::Control(text) => *text,
            })
            .collect();
        assert_eq!(joined, text);
        let controls = parts.iter().filter(|part| matches!(part, NotationPart::Control(_))).count();
        assert_eq!(controls > 0, !matches!(format.calls, CallFormat::Hermes | CallFormat::Llama), "{format:?}");
    }
}

#[test]
fn without_tools_an_answer_is_plain() {
    let none: Arc<[String]> = Arc::from([]);
    assert!(AnswerParser::new(LLAMA, none.clone(), "").is_plain());
    assert!(!AnswerParser::new(HERMES, none, "").is_plain(), "it may reason");
    assert!(!parser(LLAMA, "").is_plain());
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        format in prop::sample::select(vec![HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GRANITE, DEEPSEEK, DEEPSEEK_BARE, HARMONY]),
        prompt in prop::sample::select(vec!["", "<think>\n"]),
        words in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "get[ARGS]{}", "<|tool_call|>", " ", "\n", "a", "é", "<", "{", "}", ";",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
            "<|start|>assistant", "<|channel|>analysis", "<|channel|>final", " to=functions.get", "<|message|>", "<|end|>", "<|call|>",
            "{\"name\": \"get\", \"arguments\": {}}", "{\"name\": \"put\", \"parameters\": {}}", "[{\"name\": \"get\", \"arguments\": {}}]",
        ]), 0..9),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text: String = words.concat();
        let mut at: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let (whole, _) = parts(parser(format, prompt), &[&text]);
        prop_assert_eq!(&parts(parser(format, prompt), &pieces).0, &whole);
        let calls = whole.iter().filter_map(|part| if let Part::Call(call) = part { Some(call) } else { None });
        for call in calls {
            prop_assert!(serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&call.arguments).is_ok());
        }
    }
}

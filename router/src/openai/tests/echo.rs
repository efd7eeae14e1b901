//! What answers show of their prompts.

use super::*;
use crate::output::{Delta, Finished};
use baton_types::{PromptLogprob, TokenLogprobs};

fn scored(token: u32, chosen: f32, rank: u32, top: &[(u32, f32)]) -> PromptLogprob {
    PromptLogprob { token, rank, logprobs: TokenLogprobs { chosen, top: top.to_vec() } }
}

/// The second and third tokens of the prompt "abc".
fn parts() -> [Vec<PromptLogprob>; 2] {
    let none = f32::NEG_INFINITY;
    [vec![scored(98, -1.5, 2, &[(120, -0.5), (98, -1.5)])], vec![scored(99, -3.0, 7, &[(300, -0.25), (121, none)])]]
}

fn form(endpoint: Endpoint, options: AnswerOptions, samples: u32) -> AnswerHead {
    let text = if options.echo { "abc".into() } else { "".into() };
    let prompts = vec![PromptShown { tokens: 3, first: Some(97), text, ..PromptShown::default() }];
    AnswerHead { options, samples, prompts, ..head(endpoint) }
}

/// The whole answer of these options, whose bytes are counted before they are written.
fn whole(endpoint: Endpoint, options: AnswerOptions, samples: u32) -> Value {
    let head = form(endpoint, options, samples);
    let mut counted = head.bytes_before();
    let mut all: Vec<(Delta, Finished)> = Vec::new();
    for sample in 0..samples {
        let mut answer = Delta { sample, ..generated() };
        counted += head.bytes_of(&answer);
        for part in parts().into_iter().filter(|_| sample == 0) {
            counted += head.bytes_of(&Delta { prompt: part.clone(), ..Delta::default() });
            answer.prompt.extend(part);
        }
        all.push((answer, finished(sample, &[])));
    }
    let total = total();
    let whole = head.whole(&all, &total);
    let length = serialize::length(&whole);
    assert!(length <= counted, "{length} of {counted}");
    read(&String::from_utf8(serialize::write(&whole, length).unwrap()).unwrap())
}

fn echo(logprobs: Option<u32>) -> AnswerOptions {
    AnswerOptions { echo: true, echo_logprobs: logprobs, ..AnswerOptions::default() }
}

#[test]
fn an_answer_begins_with_its_prompt() {
    let answer = whole(Endpoint::Completions, echo(Some(1)), 2);
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "abca\"");
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "a", "\""]));
        let point_1 = f64::from(-0.1_f32);
        assert_eq!(logprobs["token_logprobs"], json!([null, -1.5, -3.0, point_1, -1.0]));
        let top = json!([
            null,
            {"x": -0.5, "b": -1.5},
            {"token_id:300": -0.25, "c": -3.0},
            {"\u{fffd}": -9999.0, "a": point_1},
            {"\"": -1.0}
        ]);
        assert_eq!(logprobs["top_logprobs"], top, "as many as the client asked for, and the token itself");
        assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
        assert_eq!(choice.get("prompt_logprobs"), None);
    }
    // Its own log-probabilities are those that workers sent for `best_of`.
    let best = Some(crate::openai::best::Best { shown: 1, logprobs: false });
    let answer = whole(Endpoint::Completions, AnswerOptions { best, ..echo(None) }, 3);
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("abca\""), &Value::Null));
}

#[test]
fn a_prompt_has_log_probabilities_of_its_own() {
    let expected = |top: u32| {
        let entry =
            |logprob: f64, rank: u32, text: &str| json!({"logprob": logprob, "rank": rank, "decoded_token": text});
        let mut second = json!({"98": entry(-1.5, 2, "b")});
        let mut third = json!({"99": entry(-3.0, 7, "c")});
        if top > 0 {
            second["120"] = entry(-0.5, 1, "x");
            third["300"] = entry(-0.25, 1, "token_id:300");
        }
        if top > 1 {
            third["121"] = entry(-9999.0, 2, "y");
        }
        json!([null, second, third])
    };
    for top in [0, 1, 2] {
        let options = AnswerOptions { prompt_logprobs: Some(top), ..AnswerOptions::default() };
        let answer = whole(Endpoint::Completions, options.clone(), 2);
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!((&choice["prompt_logprobs"], &choice["text"]), (&expected(top), &json!("a\"")));
            assert_eq!(choice["logprobs"]["tokens"], json!(["a", "\""]), "the prompt is not echoed");
        }
        assert_eq!(answer.get("prompt_logprobs"), None);
        let answer = whole(Endpoint::Chat, options, 2);
        assert_eq!((&answer["prompt_logprobs"], answer["choices"][0].get("prompt_logprobs")), (&expected(top), None));
    }
}

#[test]
fn streams_show_the_prompt_first() {
    let stream = |logprobs, include_usage| AnswerOptions { stream: true, include_usage, ..echo(logprobs) };
    let mut chunks = chunks_of(form(Endpoint::Completions, stream(None, false), 2));
    let first: Vec<_> = opening(&mut chunks).iter().map(|chunk| chunk["choices"][0].clone()).collect();
    let expected = |index: u32| json!({"index": index, "text": "abc", "logprobs": null, "finish_reason": null});
    assert_eq!(first, [expected(0), expected(1)]);

    let mut chunks = chunks_of(form(Endpoint::Completions, stream(Some(2), true), 2));
    assert!(opening(&mut chunks).is_empty(), "the log-probabilities are not known yet");
    for part in parts() {
        let delta = Delta { prompt: part, ..Delta::default() };
        assert!(written(|to| chunks.delta(&delta, to)).is_empty());
    }
    let mut next = |sample| {
        let chunks = written(|to| chunks.delta(&Delta { sample, ..generated() }, to));
        let choices = chunks.into_iter().map(|chunk| chunk["choices"][0].clone());
        choices.map(|choice| (choice["text"].clone(), choice["logprobs"]["text_offset"].clone())).collect::<Vec<_>>()
    };
    let (prompt, answer) = ((json!("abc"), json!([0, 1, 2])), (json!("a\""), json!([3, 4])));
    assert_eq!(next(1), [prompt.clone(), answer.clone()]);
    assert_eq!(next(0), [prompt, answer]);
    assert_eq!(next(1), [(json!("a\""), json!([5, 6]))]);

    // Nothing is generated.
    let mut chunks = chunks_of(form(Endpoint::Completions, stream(Some(0), false), 1));
    let empty = Delta { cached_tokens: Some(0), ..Delta::default() };
    let chunk = written(|to| chunks.delta(&empty, to)).remove(0)["choices"][0].take();
    assert_eq!((&chunk["text"], &chunk["logprobs"]["tokens"]), (&json!("abc"), &json!(["a"])));
}

#[test]
fn what_a_stream_keeps_of_a_prompt_is_counted_until_all_choices_have_shown_it() {
    let all = baton_node::intake::Intake::new(32 << 10, 32 << 10);
    let room = || all.hold(baton_node::intake::Client::Tenant("a".into()));
    let long = || Delta { prompt: vec![scored(98, -1.5, 2, &[]); 100], ..Delta::default() };
    let mut chunks = Chunks::new(form(Endpoint::Completions, echo(Some(0)), 2), room());
    chunks.delta(&long(), &mut Vec::new()).unwrap();
    let held = all.used();
    assert!(held > 100 * size_of::<PromptLogprob>() as u64, "{held}");
    for sample in [0, 1] {
        assert_eq!(all.used(), held);
        chunks.delta(&Delta { sample, ..generated() }, &mut Vec::new()).unwrap();
    }
    assert_eq!(all.used(), 0);
    let mut chunks = Chunks::new(form(Endpoint::Completions, echo(Some(0)), 1), room());
    let refused = (0..10).find_map(|_| chunks.delta(&long(), &mut Vec::new()).err());
    assert_eq!(refused.map(|error| error.kind), Some(ErrorKind::Overloaded));
}

#[test]
fn what_is_asked_of_a_prompt_is_read() {
    let asked = |more: Value| {
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (_, common) = completions::parse(body.to_string().as_bytes())?;
        let (parameters, options) = (common.parameters, common.options);
        let asked =
            (parameters.sampling.prompt_logprobs, options.echo_logprobs, options.prompt_logprobs, parameters.echo);
        parameters.check(1).map(|()| asked)
    };
    for (more, expected) in [
        (json!({}), (None, None, None, false)),
        (json!({"echo": false, "logprobs": 3}), (None, None, None, false)),
        (json!({"echo": true}), (None, None, None, true)),
        (json!({"echo": true, "logprobs": 3}), (Some(3), Some(3), None, true)),
        (json!({"prompt_logprobs": 0}), (Some(0), None, Some(0), false)),
        (json!({"echo": true, "logprobs": 1, "prompt_logprobs": 2}), (Some(2), Some(1), Some(2), true)),
        (json!({"echo": true, "max_tokens": 0}), (None, None, None, true)),
        (json!({"prompt_logprobs": 1, "max_tokens": 0}), (Some(1), None, Some(1), false)),
    ] {
        assert_eq!(asked(more.clone()).unwrap(), expected, "{more}");
    }
    for (more, param) in [
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 0, "echo": false, "logprobs": 1}), "max_tokens"),
        (json!({"max_tokens": 0, "echo": true, "min_tokens": 1}), "min_tokens"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"echo": true, "logprobs": 21}), "logprobs"),
    ] {
        assert_eq!(asked(more.clone()).unwrap_err().param.as_deref(), Some(param), "{more}");
    }
}

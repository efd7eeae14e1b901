//! Options of prompts and answers, as requests state them.

use super::{chat, completion};
use crate::openai::{Common, completions};
use crate::request::{BadWords, Prompt, Truncate};
use baton_text::Ending;
use serde_json::{Value, json};

#[test]
fn the_end_of_a_chat_is_read() {
    let ending = |more: Value| {
        let mut body = chat();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        match chat::parse(body.to_string().as_bytes()) {
            Ok((Prompt::Chat { ending, .. }, _)) => Ok(ending),
            Ok(_) => panic!("not a chat"),
            Err(error) => Err(error.param),
        }
    };
    assert_eq!(ending(json!({})), Ok(Ending::Answer));
    assert_eq!(ending(json!({"add_generation_prompt": true, "continue_final_message": false})), Ok(Ending::Answer));
    assert_eq!(ending(json!({"add_generation_prompt": false})), Ok(Ending::Messages));
    assert_eq!(ending(json!({"continue_final_message": true})), Ok(Ending::Continued));
    assert_eq!(ending(json!({"add_generation_prompt": false, "continue_final_message": true})), Ok(Ending::Continued));
    let both = json!({"add_generation_prompt": true, "continue_final_message": true});
    assert_eq!(ending(both), Err(Some("continue_final_message".into())));
}

#[test]
fn penalties_have_two_names_and_prompts_are_cut() {
    let parse = |more: Value| {
        let mut body = completion();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let parsed = completions::parse(body.to_string().as_bytes());
        parsed.map(|(_, common)| common.parameters).map_err(|error| error.param.unwrap())
    };
    let penalty = |more| parse(more).map(|parameters| parameters.sampling.repetition_penalty);
    assert_eq!(penalty(json!({"repeat_penalty": 1.5})), Ok(Some(1.5)));
    assert_eq!(penalty(json!({"repetition_penalty": 1.5, "repeat_penalty": 1.5})), Ok(Some(1.5)));
    assert_eq!(penalty(json!({"repetition_penalty": 1.5, "repeat_penalty": 1.4})), Err("repeat_penalty".into()));
    let truncate = |n| parse(json!({"truncate_prompt_tokens": n})).map(|parameters| parameters.truncate);
    assert_eq!(truncate(-1), Ok(Some(Truncate::ToContext)));
    assert_eq!(truncate(5), Ok(Some(Truncate::try_new(5).unwrap())));
    assert_eq!(truncate(0), Err("truncate_prompt_tokens".into()));
}

#[test]
fn best_of_makes_more_answers_than_it_shows() {
    let parse = |more: Value| {
        let mut body = completion();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let parsed = completions::parse(body.to_string().as_bytes());
        let asks = |(_, common): (_, Common)| {
            let best = common.options.best.map(|best| (best.shown, best.logprobs));
            (common.parameters.samples, best, common.parameters.sampling.logprobs)
        };
        parsed.map(asks).map_err(|error| error.param.unwrap())
    };
    assert_eq!(parse(json!({"best_of": 1})), Ok((1, None, None)));
    assert_eq!(parse(json!({"best_of": 3, "n": 3, "stream": true})), Ok((3, None, None)));
    assert_eq!(parse(json!({"best_of": 3, "n": 2})), Ok((3, Some((2, false)), Some(0))));
    assert_eq!(parse(json!({"best_of": 3, "logprobs": 2})), Ok((3, Some((1, true)), Some(2))));
    for wrong in [json!({"best_of": 2, "n": 3}), json!({"best_of": 129}), json!({"best_of": 2, "stream": true})] {
        assert_eq!(parse(wrong), Err("best_of".into()));
    }
}

#[test]
fn filters_of_words_and_of_typical_tokens_are_read() {
    let parse = |field: &str, value: Value| {
        let parsed = completions::parse(json!({"prompt": "x", field: value}).to_string().as_bytes());
        parsed.map(|(_, common)| common.parameters.sampling).map_err(|error| error.param.unwrap())
    };
    assert_eq!(parse("typical_p", json!(0.5)).unwrap().typical_p, Some(0.5));
    assert_eq!(parse("typical_p", json!(0)).unwrap().check().unwrap_err().name, "typical_p");
    let words = BadWords::try_new(vec!["a".into(), "b c".into()]).unwrap();
    assert_eq!(parse("bad_words", json!(["a", " b c"])).unwrap().bad_words, words);
    for wrong in [json!("a"), json!([1]), json!([""]), json!(vec!["a"; 129])] {
        assert_eq!(parse("bad_words", wrong), Err("bad_words".into()));
    }
}

#[test]
fn what_is_asked_of_logits_is_read() {
    let parse = |field: &str, value: Value| {
        let parsed = completions::parse(json!({"prompt": "x", field: value}).to_string().as_bytes());
        parsed.map(|(_, common)| common.parameters.sampling).map_err(|error| error.param)
    };
    assert_eq!(parse("logit_bias", json!({"5": -100, "0": 1.5})).unwrap().logit_bias, [(5, -100.0), (0, 1.5)]);
    assert_eq!(parse("logit_bias", json!({})).unwrap().logit_bias, []);
    assert_eq!(parse("allowed_token_ids", json!([3, 1])).unwrap().allowed_token_ids, [3, 1]);
    assert_eq!(parse("min_tokens", json!(3)).unwrap().min_tokens, 3);
    for bias in [json!([[5, 1]]), json!({"-5": 1}), json!({"five": 1}), json!({"5": "1"}), json!(5)] {
        assert_eq!(parse("logit_bias", bias), Err(Some("logit_bias".into())));
    }
    assert_eq!(parse("allowed_token_ids", json!([])), Err(Some("allowed_token_ids".into())));
    // One too many is told by its number, and all others are not read.
    let many: serde_json::Map<_, _> = (0..9_000).map(|token| (token.to_string(), json!(1))).collect();
    let read = parse("logit_bias", Value::Object(many)).unwrap();
    assert_eq!((read.logit_bias.len(), read.check().unwrap_err().name), (1025, "logit_bias"));
}

#[test]
fn an_effort_is_an_argument_of_the_template() {
    let asked = |more: Value| {
        let mut body = chat();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        crate::openai::chat::parse(body.to_string().as_bytes()).map(|(prompt, common)| match prompt {
            Prompt::Chat { template_kwargs, .. } => {
                (template_kwargs.get("reasoning_effort").cloned(), common.has_effort)
            }
            Prompt::Segments(_) | Prompt::List(_) => panic!("not a chat"),
        })
    };
    assert_eq!(asked(json!({})).unwrap(), (None, false));
    assert_eq!(asked(json!({"reasoning_effort": null})).unwrap(), (None, false));
    assert_eq!(asked(json!({"reasoning_effort": "high"})).unwrap(), (Some(json!("high")), true));
    let both = json!({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}});
    assert_eq!(asked(both).unwrap(), (Some(json!("low")), true));
    for wrong in [json!("lots"), json!(1), json!({})] {
        let error = asked(json!({"reasoning_effort": wrong})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("reasoning_effort"), "{error}");
    }
}

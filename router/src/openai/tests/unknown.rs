//! Fields that change nothing: those that are known to, and those that nobody knows.

use super::*;

#[test]
fn ignored_fields_take_any_value() {
    let names = [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ];
    for name in names {
        for value in [json!("x"), json!({"a": 1}), json!(true)] {
            assert!(chat::parse(&with(chat(), name, value.clone())).is_ok(), "{name}");
            assert!(completions::parse(&with(completion(), name, value)).is_ok(), "{name}");
        }
    }
}

#[test]
fn unknown_fields_are_told_within_bounds() {
    let unknown = |body: String| completions::parse(body.as_bytes()).unwrap().1;
    let told = unknown(r#"{"prompt": "x", "b": null, "a": 1, "a": 2, "c, d\n": 1, "temperature": 1}"#.into());
    assert_eq!(told.unknown.check_none().unwrap_err().param.as_deref(), Some("b"));
    assert_eq!(told.unknown.into_names(), ["b", "a", "c??d?"]);
    let many: String = (0..1000).map(|n| format!(r#""{n}{}": 1, "#, "x".repeat(1 << 10))).collect();
    let told = unknown(format!(r#"{{{many}"prompt": "x"}}"#)).unknown.into_names();
    assert!(told.len() == 8 && told.iter().all(|name| name.len() == 64), "{told:?}");
    assert!(unknown(r#"{"prompt": "x", "user": "y"}"#.into()).unknown.check_none().is_ok());
}

#[test]
fn unknown_fields_inside_of_others_are_told_once() {
    let message = json!({"role": "user", "weight": 1, "refusal": null, "annotations": [],
        "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b", "x,": 1}]});
    let body =
        json!({"messages": [message, message], "stream": true, "stream_options": {"pace": 1, "include_usage": true}});
    let (prompt, common) = chat::parse(body.to_string().as_bytes()).unwrap();
    let Prompt::Chat { messages, .. } = prompt else { panic!("not a chat") };
    let expected = Message {
        role: Role::User,
        content: Some(Content::Parts(vec!["a".into(), "b".into()])),
        extra: Default::default(),
    };
    assert_eq!(messages, [expected.clone(), expected]);
    assert!(common.options.include_usage);
    assert_eq!(
        common.unknown.check_none().unwrap_err().message,
        "unknown field stream_options.pace",
        "as with strict fields"
    );
    let told = common.unknown.into_names();
    let inside = ["messages[].content[].cache_control", "messages[].content[].x?", "messages[].weight"];
    assert_eq!(told[0], "stream_options.pace");
    let mut of_messages = told[1..].to_vec();
    of_messages.sort();
    assert_eq!(of_messages, inside);
    for field in ["audio", "function_call", "images", "partial", "prefix", "videos"] {
        let message = json!({"role": "assistant", "content": "x", field: {"a": 1}});
        let error = chat::parse(&with(chat(), "messages", json!([message]))).unwrap_err();
        assert_eq!(
            (error.kind, error.param),
            (ErrorKind::Unsupported, Some(format!("messages[0].{field}"))),
            "it would have another prompt"
        );
    }
}

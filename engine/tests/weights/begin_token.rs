//! What a Hugging Face folder's tokenizer puts before a plain prompt, as transformers' fast tokenizers do.

use crate::folder::Folder;
use crate::huggingface::{open, refused};
use baton_engine::formats::{ModelSource, TextSource};
use serde_json::{Value, json};

/// What a folder with this post-processor and tokenizer configuration puts before a plain prompt.
fn begin_token(post_processor: &Value, config: &Value) -> Option<String> {
    let model = open(|f| {
        f.write("tokenizer.json", json!({"post_processor": post_processor}).to_string());
        f.write("tokenizer_config.json", config.to_string());
    });
    let TextSource::Bundle(bundle) = model.text() else { panic!("there is a tokenizer") };
    bundle.bos_token.filter(|_| bundle.add_bos)
}

fn special(token: &str) -> Value {
    json!({"SpecialToken": {"id": token, "type_id": 0}})
}

fn template(before: &[&str], after: &[&str]) -> Value {
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let [before, after] = [before, after].map(|tokens| tokens.iter().map(|token| special(token)));
    json!({"type": "TemplateProcessing", "single": before.chain([text]).chain(after).collect::<Vec<_>>()})
}

#[test]
fn the_begin_token_is_what_the_post_processor_adds() {
    let (adds, none, bytes) = (template(&["<s>"], &[]), Value::Null, json!({"type": "ByteLevel"}));
    let nested = json!({"type": "Sequence", "processors": [bytes, adds]});
    let plain =
        |add: Value| json!({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": add});
    let cases = [
        (&adds, plain(json!(null)), Some("<s>")),
        (&adds, plain(json!(false)), Some("<s>")),
        (&nested, plain(json!(false)), Some("<s>")),
        (&nested, json!({"bos_token": {"content": "<s>"}}), Some("<s>")),
        (&adds, json!({}), Some("<s>")),
        (&bytes, plain(json!(true)), None),
        (&none, plain(json!(true)), None),
        (&template(&[], &[]), plain(json!(true)), None),
    ];
    for (post_processor, config, expected) in cases {
        assert_eq!(begin_token(post_processor, &config).as_deref(), expected, "{post_processor} {config}");
    }
}

#[test]
fn tokenizers_of_llama_replace_the_post_processor() {
    for class in ["LlamaTokenizer", "LlamaTokenizerFast"] {
        let llama = |add: Value| json!({"tokenizer_class": class, "bos_token": "<s>", "add_bos_token": add});
        for post_processor in [Value::Null, template(&["<s>"], &[]), template(&["<x>"], &["</s>"])] {
            for (add, expected) in [(json!(null), Some("<s>")), (json!(true), Some("<s>")), (json!(false), None)] {
                let added = begin_token(&post_processor, &llama(add.clone()));
                assert_eq!(added.as_deref(), expected, "{class} {post_processor} {add}");
            }
        }
    }
}

#[test]
fn tokens_that_no_prompt_gets_are_refused() {
    let bad = |post_processor: Value, config: Value, parts: &[&str]| {
        let damage = |f: &mut Folder| {
            f.write("tokenizer.json", json!({"post_processor": post_processor}).to_string());
            f.write("tokenizer_config.json", config.to_string());
        };
        refused(damage, parts);
    };
    let bos = json!({"bos_token": "<s>"});
    let end = template(&["<s>"], &["</s>"]);
    bad(end.clone(), bos.clone(), &["tokenizer.json", "post_processor", "</s>"]);
    bad(json!({"type": "Sequence", "processors": [end]}), bos.clone(), &["post_processor", "</s>"]);
    bad(template(&["<s>", "<x>"], &[]), bos.clone(), &["post_processor", "<x>"]);
    let twice = json!({"type": "Sequence", "processors": [template(&["<s>"], &[]), template(&["<s>"], &[])]});
    bad(twice, bos.clone(), &["post_processor"]);
    bad(json!({"type": "BertProcessing"}), bos, &["post_processor", "BertProcessing"]);
    bad(template(&["<s>"], &[]), json!({"bos_token": "<x>"}), &["post_processor", "bos_token", "<x>"]);
    let llama = |key: &str, value: Value| json!({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", key: value});
    bad(Value::Null, llama("add_eos_token", json!(true)), &["tokenizer_config.json", "add_eos_token"]);
    bad(Value::Null, llama("bos_token", Value::Null), &["tokenizer_config.json", "bos_token"]);
}

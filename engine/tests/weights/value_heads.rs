//! GGUF files of Qwen3.5: value heads in another order than in Hugging Face's files, decays as factors, and a layer that is not computed.

use crate::deepseek::renamed;
use crate::families::fixture;
use crate::folder::Folder;
use baton_engine::families::{LayerTensor, TensorName};
use baton_engine::formats::{GgufModel, ModelSource};

const FILE: &str = "qwen3_5.gguf";

/// A copy of the file in which a key has another number of 32 bits.
fn with(key: &str, value: [u8; 4]) -> Result<(), String> {
    let mut bytes = std::fs::read(fixture(FILE)).unwrap();
    let at = bytes.windows(key.len()).position(|part| part == key.as_bytes()).expect(key) + key.len();
    // The number of its type comes first.
    bytes[at + 4..at + 8].copy_from_slice(&value);
    opened(&bytes)
}

fn opened(bytes: &[u8]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let model = GgufModel::open(&path, None).map_err(|error| error.to_string())?;
    let read = model.spec().tensor_names().map(|name| model.tensor(name).map(drop));
    read.collect::<Result<(), _>>().map_err(|error| error.to_string())
}

#[test]
fn a_gguf_file_is_the_same_model() {
    let gguf = GgufModel::open(&fixture(FILE), None).unwrap();
    let folder = Folder::of(&fixture("qwen3_5")).open().unwrap();
    assert_eq!(gguf.spec(), folder.spec());
    let delta = gguf.spec().layers[0].delta.unwrap();
    assert!(delta.key_heads > 1 && delta.key_heads < delta.value_heads && delta.key_dim != delta.value_dim);
    for name in gguf.spec().tensor_names() {
        let (read, expected) = (gguf.tensor(name).unwrap(), folder.tensor(name).unwrap());
        if matches!(name, TensorName::Layer(_, LayerTensor::DeltaDecay)) {
            // The file has its exponential, rounded.
            let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
            assert!(read.len() == expected.len() && read.iter().zip(&expected).all(near), "{name}");
        } else {
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(read), bits(expected), "{name}");
        }
    }
}

#[test]
fn keys_that_are_absent_are_refused_by_name() {
    for key in [
        "rope.dimension_count",
        "rope.freq_base",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    ] {
        // Of another architecture, so that nobody reads it.
        let message = renamed(FILE, &format!("qwen35.{key}"), &format!("qwen36.{key}")).unwrap_err();
        assert!(message.contains(&format!("{key} is missing")), "{message}");
    }
    // llama.cpp's default is what the file says.
    renamed(FILE, "qwen35.full_attention_interval", "qwen36.full_attention_interval").unwrap();
    let message = renamed(FILE, "qwen35.ssm.state_size", "qwen35.ssm.state_sizx").unwrap_err();
    assert!(message.contains("ssm.state_sizx") && message.contains("not supported"), "{message}");
}

#[test]
fn what_does_not_fit_is_refused() {
    for (key, value, part) in [
        ("qwen35.ssm.inner_size", 21, "ssm.inner_size 21 does not divide among 4 heads"),
        ("qwen35.ssm.time_step_rank", 0, "does not divide among 0 heads"),
        ("qwen35.ssm.group_count", 3, "4 value heads do not divide among 3 key heads"),
        ("qwen35.ssm.state_size", 7, "attn_qkv.weight has dimensions"),
        ("qwen35.ssm.conv_kernel", 3, "ssm_conv1d.weight has dimensions"),
        ("qwen35.full_attention_interval", 0, "full_attention_interval is 0"),
        ("qwen35.full_attention_interval", 3, "tensor blk."),
        ("qwen35.nextn_predict_layers", 9, "nextn_predict_layers is 9, of 9 layers in all"),
        ("qwen35.nextn_predict_layers", 10, "nextn_predict_layers is 10, of 9 layers in all"),
    ] {
        let message = with(key, u32::to_le_bytes(value)).unwrap_err();
        assert!(message.contains(part), "{key} = {value}: {message}");
    }
}

/// A layer behind the last one is left out because the file says so, and for no other reason.
#[test]
fn a_layer_that_predicts_later_tokens_is_left_out() {
    with("qwen35.nextn_predict_layers", 1u32.to_le_bytes()).unwrap();
    let message = with("qwen35.nextn_predict_layers", 0u32.to_le_bytes()).unwrap_err();
    assert!(message.contains("blk.8.") && message.contains("not supported"), "{message}");
}

#[test]
fn decays_that_are_no_factors_are_refused() {
    let gguf = GgufModel::open(&fixture(FILE), None).unwrap();
    let decay = gguf.tensor(TensorName::Layer(0, LayerTensor::DeltaDecay)).unwrap()[0];
    let mut bytes = std::fs::read(fixture(FILE)).unwrap();
    // The first value head of the first key head is first in both orders.
    let near = |b: &[u8]| (f32::from_le_bytes([b[0], b[1], b[2], b[3]]) + decay.exp()).abs() < 1e-6 * decay.exp();
    let at = bytes.chunks_exact(4).position(near).expect("the file has it") * 4;
    bytes[at..at + 4].copy_from_slice(&1.0f32.to_le_bytes());
    let message = opened(&bytes).unwrap_err();
    assert!(message.contains("ssm_a") && message.contains("decay is 1; it is below 0"), "{message}");
}

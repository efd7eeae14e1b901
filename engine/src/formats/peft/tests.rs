//! Folders as peft writes them, and what is refused.

use super::*;
use crate::formats::{ModelSource as _, RandomModel};
use serde_json::{Value, json};

const LIMITS: AdapterLimits = AdapterLimits { rank_max: 8, bytes_max: 1 << 20 };

fn spec() -> DecoderSpec {
    let model = "random:hidden=8,layers=2,heads=2,kv_heads=1,head_dim=4,ffn=6,vocab=30,context=64";
    RandomModel::parse(model).unwrap().spec().clone()
}

/// A tensor of rising numbers, in f32.
struct Rising(Vec<usize>, f32);

impl safetensors::View for &Rising {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.0
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        let floats = (0..self.0.iter().product::<usize>()).map(|i| self.1 + i as f32);
        floats.flat_map(f32::to_le_bytes).collect::<Vec<_>>().into()
    }
    fn data_len(&self) -> usize {
        self.0.iter().product::<usize>() * 4
    }
}

struct Folder(tempfile::TempDir);

impl Folder {
    /// With these modules of shapes A and B; `change` edits the configuration.
    fn new(modules: &[(&str, [usize; 2], [usize; 2])], change: impl FnOnce(&mut Value)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({
            "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "org/base", "bias": "none",
            "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "layers_to_transform": null,
            "lora_alpha": 16, "lora_dropout": 0.1, "modules_to_save": null, "peft_type": "LORA", "r": 2,
            "qalora_group_size": 16, "rank_pattern": {}, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
            "use_dora": false, "use_rslora": false,
        });
        change(&mut config);
        std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        let tensors: Vec<(String, Rising)> = modules
            .iter()
            .flat_map(|(module, a, b)| [(module, "A", a, 1.0), (module, "B", b, 100.0)])
            .map(|(module, which, shape, from)| {
                (format!("base_model.model.{module}.lora_{which}.weight"), Rising(shape.to_vec(), from))
            })
            .collect();
        let tensors = tensors.iter().map(|(name, tensor)| (name, tensor));
        std::fs::write(folder.path().join(WEIGHTS), safetensors::serialize(tensors, None).unwrap()).unwrap();
        Self(folder)
    }

    fn read(&self) -> Result<Adapter, String> {
        read_peft(self.0.path(), &spec(), LIMITS).map_err(|error| error.to_string())
    }
}

const QUERY: (&str, [usize; 2], [usize; 2]) = ("model.layers.0.self_attn.q_proj", [2, 8], [8, 2]);
const DOWN: (&str, [usize; 2], [usize; 2]) = ("model.layers.1.mlp.down_proj", [2, 6], [8, 2]);

fn rising(from: f32, len: usize) -> Vec<f32> {
    (0..len).map(|i| from + i as f32).collect()
}

#[test]
fn a_folder_is_read() {
    let adapter = Folder::new(&[QUERY, DOWN], |_| ()).read().unwrap();
    let change = |layer, linear, k: usize| AdapterLinear {
        layer,
        linear,
        a: rising(1.0, 2 * k),
        b: rising(100.0, 16),
        scale: 8.0,
    };
    let want = vec![change(0, Linear::Query, 8), change(1, Linear::Down, 6)];
    assert_eq!(adapter, Adapter { rank: 2, linears: want });
    adapter.pack().unwrap();
    // Of a model without its head.
    let bare = Folder::new(&[("layers.0.self_attn.q_proj", [2, 8], [8, 2])], |_| ()).read().unwrap();
    assert_eq!(bare.linears[0], adapter.linears[0]);
    let rs = Folder::new(&[QUERY], |config| config["use_rslora"] = json!(true)).read().unwrap();
    assert_eq!(rs.linears[0].scale, (16.0 / 2f64.sqrt()) as f32);
}

#[test]
fn patterns_give_modules_ranks_and_factors() {
    let down = ("model.layers.1.mlp.down_proj", [3, 6], [8, 3]);
    let change = |config: &mut Value| {
        config["rank_pattern"] = json!({"down_proj": 3});
        config["alpha_pattern"] = json!({"^model.layers.0.self_attn.q_proj": 5.0});
    };
    let adapter = Folder::new(&[QUERY, down], change).read().unwrap();
    assert_eq!(adapter.rank, 3);
    let [query, down] = &adapter.linears[..] else { panic!("{adapter:?}") };
    assert_eq!((query.scale, down.scale), (2.5, (16.0f64 / 3.0) as f32));
    // Padded with zeros: rows of A, and columns of B.
    assert_eq!(query.a, [rising(1.0, 16), vec![0.0; 8]].concat());
    assert_eq!(query.b[..6], [100.0, 101.0, 0.0, 102.0, 103.0, 0.0]);
    assert_eq!(down.b, rising(100.0, 24));
}

#[test]
fn fused_modules_are_cut_into_their_parts() {
    let fused = ("model.layers.0.self_attn.qkv_proj", [2, 8], [16, 2]);
    let adapter = Folder::new(&[fused], |_| ()).read().unwrap();
    let parts: Vec<_> = adapter.linears.iter().map(|part| (part.linear, part.b[0], part.b.len())).collect();
    assert_eq!(parts, [(Linear::Query, 100.0, 16), (Linear::Key, 116.0, 8), (Linear::Value, 124.0, 8)]);
    assert!(adapter.linears.iter().all(|part| part.a == rising(1.0, 16)));
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let check = |part: &str, change: fn(&mut Value)| {
        let error = Folder::new(&[QUERY], change).read().unwrap_err();
        assert!(error.contains(part) && error.contains("adapter_config.json"), "{part}: {error}");
    };
    check("use_dora = true is not supported: DoRA", |config| config["use_dora"] = json!(true));
    check("modules_to_save = [\"lm_head\"] is not supported", |c| c["modules_to_save"] = json!(["lm_head"]));
    check("bias = \"all\"", |config| config["bias"] = json!("all"));
    check("peft_type = \"IA3\"", |config| config["peft_type"] = json!("IA3"));
    check("layer_replication", |config| config["layer_replication"] = json!([[0, 2]]));
    check("init_lora_weights = \"pissa_niter_4\"", |c| c["init_lora_weights"] = json!("pissa_niter_4"));
    check("something_new = 3", |config| config["something_new"] = json!(3));
    check("r is missing", |config| drop(config.as_object_mut().unwrap().remove("r")));
    check("r is 0", |config| config["r"] = json!(0));
    check("lora_alpha is missing", |config| config["lora_alpha"] = json!("16"));
    check("regular expressions", |config| config["rank_pattern"] = json!({".*q_proj": 3}));
    check("several values", |c| c["rank_pattern"] = json!({"q_proj": 2, "self_attn.q_proj": 3}));
    check("q_proj has no value", |config| config["rank_pattern"] = json!({"q_proj": -1}));
}

#[test]
fn what_recurrent_layers_and_gates_have_is_refused_by_name() {
    let base = "random:hidden=8,layers=2,heads=2,kv_heads=1,head_dim=4,ffn=6,vocab=30,context=64,gate=true,delta=2,attention_every=2";
    let spec = RandomModel::parse(base).unwrap().spec().clone();
    let read = |module, a, b| {
        let folder = Folder::new(&[(module, a, b)], |_| ());
        read_peft(folder.0.path(), &spec, LIMITS).map_err(|error| error.to_string())
    };
    let refused = |part: &str, module, b| {
        let error = read(module, [2, 8], b).unwrap_err();
        assert!(error.contains(part), "{error}");
    };
    for module in ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"] {
        refused("layer 0 of the base model has a gated delta rule", module, [8, 2]);
    }
    refused("queries are one matrix with gates", "model.layers.1.self_attn.q_proj", [16, 2]);
    refused("model.layers.0.linear_attn.out_proj", "model.layers.0.linear_attn.out_proj", [8, 2]);
    for (module, n) in [("model.layers.1.self_attn.k_proj", 4), ("model.layers.1.self_attn.o_proj", 8)] {
        assert_eq!(read(module, [2, 8], [n, 2]).unwrap().linears.len(), 1);
    }
}

#[test]
fn tensors_are_checked_against_the_base_model() {
    let check = |part: &str, modules: &[(&str, [usize; 2], [usize; 2])]| {
        let error = Folder::new(modules, |_| ()).read().unwrap_err();
        assert!(error.contains(part) && error.contains(WEIGHTS), "{part}: {error}");
    };
    check(".weight is not supported: adapters of the attention's", &[("lm_head", [2, 8], [30, 2])]);
    check("is not supported", &[("model.layers.00.self_attn.q_proj", [2, 8], [8, 2])]);
    check("is of layer 2; the base model has 2", &[("model.layers.2.self_attn.q_proj", [2, 8], [8, 2])]);
    check("lora_A of model.layers.0.self_attn.q_proj has shape [2, 9]", &[(QUERY.0, [2, 9], [8, 2])]);
    check("lora_B of model.layers.0.self_attn.q_proj has shape [4, 2]", &[(QUERY.0, [2, 8], [4, 2])]);
    check("has shape [3, 8]; the base model and adapter_config.json ask for [2, 8]", &[(QUERY.0, [3, 8], [8, 3])]);
    check("it has no tensors", &[]);
    check("is there twice", &[QUERY, ("layers.0.self_attn.q_proj", [2, 8], [8, 2])]);

    let large = Folder::new(&[("model.layers.0.self_attn.q_proj", [9, 8], [8, 9])], |config| config["r"] = json!(9));
    let error = large.read().unwrap_err();
    assert!(error.contains("rank 9 of") && error.contains("--max-lora-rank"), "{error}");
    let folder = Folder::new(&[QUERY], |_| ());
    let few = AdapterLimits { bytes_max: 600, ..LIMITS };
    let path = folder.0.path();
    // 128 bytes of matrices fit, and the whole file must.
    assert!(read_peft(path, &spec(), few).is_ok());
    let error = read_peft(path, &spec(), AdapterLimits { bytes_max: 200, ..LIMITS }).unwrap_err().to_string();
    assert!(error.contains("lora.memory_bytes_max"), "{error}");
    let bytes = std::fs::read(path.join(WEIGHTS)).unwrap();
    std::fs::write(path.join(WEIGHTS), &bytes[..bytes.len() - 1]).unwrap();
    assert!(folder.read().unwrap_err().contains("no valid safetensors file"));
    std::fs::remove_file(path.join(WEIGHTS)).unwrap();
    assert!(folder.read().unwrap_err().contains("save it again with peft's save_pretrained"));
    std::fs::remove_file(path.join("adapter_config.json")).unwrap();
    assert!(folder.read().unwrap_err().contains("a folder without adapter_config.json"));
}

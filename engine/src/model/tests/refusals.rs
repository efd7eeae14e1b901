//! Invalid inputs are refused, with the right error, before they reach the device.

use super::{Batch, RAGGED, Rig, Rows, config, random, reference, tokens};
use crate::families::{DecoderSpec, LayerTensor, TensorName};
use crate::formats::{ModelSource, RandomModel, StoredTensor, TextSource, WeightsError};
use crate::model::{Model, ModelConfig, ModelError, StepInput};
use baton_kernels::device::{Bounds, Device, DeviceError, DeviceInfo, Executable, Rope, RopeTable, Weight, WeightSpec};
use baton_kernels::program::Program;
use baton_memory::{HostPool, PoolMemory};
use baton_types::{BlockId, Digest, Dtype, KvLayout, KvPoolMap, SamplingDefaults, TokenId};
use std::cell::RefCell;
use std::sync::Arc;

fn load(source: &dyn ModelSource, config: ModelConfig) -> Result<Model, ModelError> {
    Model::load(source, &*reference(Dtype::F32), config, &|_| ())
}

/// Only says what it is: a device without some kernels.
struct Lacking {
    latents: bool,
    states: bool,
}

impl Device for Lacking {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { latents: self.latents, states: self.states, ..reference(Dtype::Bf16).info() }
    }

    fn load(&self, _: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
        panic!("a weight is loaded")
    }

    fn load_rope(&self, _: RopeTable) -> Result<Rope, DeviceError> {
        panic!("a table is loaded")
    }

    fn alloc_pool(&self, _: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError> {
        panic!("a pool is allocated")
    }

    fn compile(&self, _: Program, _: Bounds) -> Result<Box<dyn Executable>, DeviceError> {
        panic!("a program is compiled")
    }
}

/// Of a model of many gigabytes nobody waits for the weights to hear it.
#[test]
fn a_device_that_lacks_a_kernel_reads_no_weight() {
    for (latents, states, model, what) in [
        (
            false,
            true,
            "random:hidden=16,heads=2,head_dim=16,rope_dim=8,latent=16,value_dim=8,ffn=16",
            "latent attention",
        ),
        (true, false, "random:hidden=16,heads=2,ffn=16,delta=2", "recurrent layers"),
        (true, false, "random:hidden=16,heads=2,ffn=16,gate=true", "gates of attention's output"),
    ] {
        let (device, load) = (Lacking { latents, states }, |_| panic!("loaded"));
        let error = Model::load(&random(model), &device, config(Dtype::Bf16), &load).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(what) && message.contains("--device cpu"), "{message}");
    }
}

#[test]
fn bounds_that_cannot_hold() {
    let check = |name: &str, change: fn(&mut ModelConfig)| {
        let mut config = config(Dtype::F32);
        change(&mut config);
        let error = load(&random(RAGGED), config).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    };
    check("rows_max", |c| c.rows_max = 0);
    check("logit_rows_max", |c| c.logit_rows_max = 0);
    check("slots_max", |c| c.slots_max = 0);
    check("model_len_max", |c| c.model_len_max = 0);
    check("the model's context", |c| c.model_len_max = 257);
}

#[test]
fn batches_that_break_a_bound() {
    let mut rig = Rig::reference(RAGGED, Dtype::F32, 16);
    let good = rig.batch(&[Rows { sequence: 0, from: 0, to: 20 }], &tokens(20));
    let mut check = |expected: &str, change: fn(&mut Batch)| {
        let mut batch = good.clone();
        change(&mut batch);
        let error = rig.run(&batch, &mut |_, _| panic!("refused batches launch nothing")).unwrap_err();
        assert!(
            matches!(error, ModelError::Device(DeviceError::Step(_))) && error.to_string().contains(expected),
            "{error}"
        );
    };
    check("0 rows", |b| *b = Batch::default());
    check("300 rows, 1 to 256 fit", |b| b.ids = vec![0; 300]);
    check("segments own 19 rows of 20", |b| b.segments[0].rows = 19);
    check("logit row 20 of 20", |b| b.logit_rows = vec![20]);
    check("21 logit rows, 20 fit", |b| b.logit_rows = vec![0; 21]);
    check("token 131 of a vocabulary of 131", |b| b.ids[7] = 131);
    check("sequences hold 256", |b| b.segments[0].position = 237);
    check("sequences hold 256", |b| b.segments[0].position = usize::MAX);
    check("1 blocks for 20 positions", |b| b.segments[0].table.blocks.truncate(1));
    check("block 32 of a pool of 32", |b| b.segments[0].table.blocks[1] = BlockId(32));
    check("0 rows from position 0", |b| {
        let mut empty = b.segments[0].clone();
        empty.rows = 0;
        b.segments.push(empty);
    });
    rig.run(&good, &mut |_, _| ()).expect("the batch itself is fine");
}

#[test]
fn pools_of_other_models() {
    let source = random(RAGGED);
    let mut model = load(&source, config(Dtype::Bf16)).unwrap();
    let batch = StepInput::default();
    assert!(matches!(model.launch(&batch, &mut |_, _| ()), Err(ModelError::Device(DeviceError::Unbound))));
    for (layers, kv_heads, head_dim, dtype) in
        [(3, 2, 10, Dtype::Bf16), (2, 1, 10, Dtype::Bf16), (2, 2, 8, Dtype::Bf16), (2, 2, 10, Dtype::F16)]
    {
        let layout = KvLayout::llama(16, layers, kv_heads, head_dim, dtype).unwrap();
        let map = KvPoolMap::try_new(layout, 4).unwrap();
        let error = model.bind(HostPool::filled(map.bytes(), 0).unwrap(), &map).unwrap_err();
        assert!(matches!(error, ModelError::WrongLayout { .. }), "{error}");
    }
}

/// A random model with one corrupted tensor.
struct Spoilt {
    model: RandomModel,
    name: TensorName,
    missing: bool,
}

impl ModelSource for Spoilt {
    fn spec(&self) -> &DecoderSpec {
        self.model.spec()
    }
    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        if name == self.name && self.missing {
            return Err(WeightsError::Spec(format!("{name} is gone")));
        }
        let StoredTensor { format, bytes } = self.model.stored(name)?;
        let mut bytes = bytes.into_owned();
        bytes.truncate(bytes.len() - usize::from(name == self.name));
        Ok(StoredTensor { format, bytes: bytes.into() })
    }
    fn fingerprint(&self) -> Digest {
        self.model.fingerprint()
    }
    fn end_tokens(&self) -> &[TokenId] {
        &[]
    }
    fn sampling_defaults(&self) -> SamplingDefaults {
        SamplingDefaults::default()
    }
    fn text(&self) -> TextSource {
        TextSource::None
    }
    fn name(&self) -> &str {
        "spoilt"
    }
}

#[test]
fn tensors_that_are_missing_or_of_another_size() {
    for name in [TensorName::Embedding, TensorName::Output, TensorName::Layer(1, LayerTensor::MlpNorm)] {
        let spoilt = |missing| Spoilt { model: random(RAGGED), name, missing };
        let error = load(&spoilt(false), config(Dtype::F32)).unwrap_err();
        assert!(matches!(error, ModelError::TensorSize { name: n, .. } if n == name), "{error}");
        let error = load(&spoilt(true), config(Dtype::F32)).unwrap_err();
        assert!(matches!(error, ModelError::Weights(_)) && error.to_string().contains("is gone"), "{error}");
    }
}

#[test]
fn progress_ends_at_one_and_the_class_names_what_decides_bits() {
    let shares = RefCell::new(Vec::new());
    let (source, config) = (random(RAGGED), config(Dtype::Bf16));
    let model =
        Model::load(&source, &*reference(Dtype::Bf16), config, &|share| shares.borrow_mut().push(share)).unwrap();
    let shares = shares.into_inner();
    assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{shares:?}");
    let compatibility = model.compatibility(model.layout(32).unwrap());
    assert_eq!(compatibility.model, source.fingerprint());
    assert_eq!((compatibility.class.weights, compatibility.class.kv), (Dtype::Bf16.into(), Dtype::Bf16));
    assert!(compatibility.check(&model.compatibility(model.layout(64).unwrap())).is_ok(), "block sizes may differ");
}

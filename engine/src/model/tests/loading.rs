//! Loading: memory of what was read is given back, and the model says what its device does.

use super::{config, numerics, random, reference};
use crate::families::{DecoderSpec, TensorName};
use crate::formats::{ModelSource, RandomModel, StoredTensor, TextSource, WeightsError};
use crate::model::Model;
use crate::step_model::StepModel;
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_types::{Digest, Dtype, SamplingDefaults, TokenId};
use std::sync::{Arc, Mutex};

const MODEL: &str = "random:layers=2,context=256";

/// A model that notes which tensors are released.
struct Noted {
    model: RandomModel,
    released: Mutex<Vec<String>>,
}

impl ModelSource for Noted {
    fn spec(&self) -> &DecoderSpec {
        self.model.spec()
    }
    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        self.model.stored(name)
    }
    fn fingerprint(&self) -> Digest {
        self.model.fingerprint()
    }
    fn release(&self, name: TensorName) {
        self.released.lock().unwrap().push(name.to_string());
    }
    fn end_tokens(&self) -> &[TokenId] {
        self.model.end_tokens()
    }
    fn sampling_defaults(&self) -> SamplingDefaults {
        self.model.sampling_defaults()
    }
    fn text(&self) -> TextSource {
        self.model.text()
    }
    fn name(&self) -> &str {
        self.model.name()
    }
}

/// Else the pages of the file stay resident beside the packed weights.
#[test]
fn every_tensor_is_released_once_it_is_packed() {
    let noted = Noted { model: random(MODEL), released: Mutex::default() };
    Model::load(&noted, &*reference(Dtype::Bf16), config(Dtype::Bf16), &|_| ()).unwrap();
    let mut released = noted.released.into_inner().unwrap();
    let mut all: Vec<String> = noted.model.spec().tensor_names().map(|name| name.to_string()).collect();
    released.sort_unstable();
    all.sort_unstable();
    assert_eq!(released, all);
}

#[test]
fn steps_are_launched_ahead_where_the_device_computes_them_late() {
    let numerics = numerics(Dtype::Bf16);
    let cpu: Arc<dyn Device> = CpuDevice::new(CpuConfig { threads: 1, simd: None, numerics }).unwrap();
    let lagging: Arc<dyn Device> = Lagging::new(cpu.clone(), LagConfig::default());
    for (device, is_late) in [(cpu, false), (lagging, true)] {
        let model = Model::load(&random(MODEL), &*device, config(Dtype::Bf16), &|_| ()).unwrap();
        assert_eq!(StepModel::is_asynchronous(&model), is_late, "{}", device.info().name);
    }
}

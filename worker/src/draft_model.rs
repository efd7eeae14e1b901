//! The draft model of a decode worker: from settings to a model that proposes tokens. It changes no bit of an answer, so neither the model's
//! fingerprint nor its card names it.

use crate::device::{check_memory, on_cpu};
use crate::error::WorkerError;
use crate::settings::{EngineSettings, ModelSettings, NumericsChoice};
use crate::{models, text};
use baton_engine::formats::ModelSource;
use baton_engine::{DraftModel, EngineConfig, EngineError, Model, ModelConfig};
use baton_kernels::device::Device;
use baton_kv_cache::PoolShape;
use baton_node::config::ByteSize;
use baton_node::host;
use baton_text::Tokenizer;
use std::sync::Arc;

/// Part of the KV pool's size that the draft model's pool has beside it, where nothing is set: models of one family that are a tenth as large
/// take about that for as many tokens.
const POOL_SHARE: u64 = 4;

/// A draft model whose tokens are those of the model, before its weights are loaded.
pub(crate) struct Opened {
    name: String,
    source: Arc<dyn ModelSource>,
    /// Its own: what a device keeps of packed weights is of one model.
    device: Arc<dyn Device>,
}

impl EngineSettings {
    /// Bytes of the draft model's pool; 0 where there is none.
    pub(crate) fn draft_kv_bytes(&self) -> ByteSize {
        let speculation = &self.speculation;
        match (speculation.draft_model.is_empty(), speculation.draft_kv_cache_bytes) {
            (true, _) => ByteSize(0),
            (false, ByteSize(0)) => ByteSize(self.kv_cache_bytes.0 / POOL_SHARE),
            (false, set) => set,
        }
    }
}

/// The draft model of the settings, with what else they say of models; `None` if there is none.
pub(crate) fn settings(model: &ModelSettings, engine: &EngineSettings) -> Option<ModelSettings> {
    let draft = Some(&engine.speculation.draft_model).filter(|draft| !draft.is_empty())?;
    Some(ModelSettings { model: draft.clone(), ..model.clone() })
}

/// Opens the draft model of the settings, if they name one, for the model of `target`.
pub(crate) fn open(
    target: &dyn ModelSource,
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: models::Progress<'_>,
) -> Result<Option<Opened>, WorkerError> {
    let Some(settings) = settings(model, engine) else { return Ok(None) };
    let name = settings.model.clone();
    check_memory(ByteSize(engine.kv_cache_bytes.0.saturating_add(engine.draft_kv_bytes().0)), host::memory_bytes())?;
    let of_draft = |source: WorkerError| WorkerError::DraftModel { name: name.clone(), source: Box::new(source) };
    let source = models::open(&settings, progress).map_err(|error| of_draft(error.into()))?;
    let differs = differs(target, source.as_ref()).map_err(of_draft)?;
    if let Some(differs) = differs {
        return Err(WorkerError::DraftTokens { name, differs });
    }
    let device = on_cpu(&settings_for(engine, source.as_ref()), source.as_ref()).map_err(of_draft)?;
    Ok(Some(Opened { name, source, device }))
}

/// A draft model may be stored in another form than the model. Its class is no one else's concern.
fn settings_for(engine: &EngineSettings, draft: &dyn ModelSource) -> EngineSettings {
    let numerics = match engine.numerics {
        NumericsChoice::I8x32 if !draft.is_quantized() => NumericsChoice::Auto,
        numerics => numerics,
    };
    EngineSettings { numerics, ..engine.clone() }
}

/// In what the tokens of two models differ, if they do. The draft model reads and writes token ids alone, so each id must stand for the same
/// bytes; how a text is split into tokens is no matter.
fn differs(target: &dyn ModelSource, draft: &dyn ModelSource) -> Result<Option<String>, WorkerError> {
    let (ours, theirs) = (target.spec().vocab, draft.spec().vocab);
    if ours != theirs {
        return Ok(Some(format!("its vocabulary has {theirs} tokens, that of the model {ours}")));
    }
    Ok(match (text::tokenizer(target)?, text::tokenizer(draft)?) {
        (None, None) => None,
        (Some(_), None) => Some("it has no tokenizer, and the model has one".into()),
        (None, Some(_)) => Some("it has a tokenizer, and the model has none".into()),
        (Some(ours), Some(theirs)) => first_other(&ours, &theirs, target.spec().vocab),
    })
}

fn first_other(ours: &Tokenizer, theirs: &Tokenizer, vocab: usize) -> Option<String> {
    let other = (0..vocab as u32).find(|id| ours.token_bytes(*id) != theirs.token_bytes(*id))?;
    let text = |tokenizer: &Tokenizer| tokenizer.token_bytes(other).map(|_| tokenizer.token_text(other));
    Some(format!("token {other} is {:?} there, and {:?} in the model", text(theirs), text(ours)))
}

impl Opened {
    /// Loads its weights, and allocates its pool.
    pub(crate) fn load(
        self,
        engine: &EngineSettings,
        config: &EngineConfig,
        progress: &dyn Fn(f32),
    ) -> Result<DraftModel, WorkerError> {
        let Self { name, source, device } = self;
        let of_draft = |source: WorkerError| WorkerError::DraftModel { name: name.clone(), source: Box::new(source) };
        let load = || {
            let spec = source.spec();
            let layout = spec.kv_layout(engine.block_tokens, engine.kv).map_err(EngineError::from)?;
            let of_pool = EngineConfig { kv_cache_bytes: engine.draft_kv_bytes().0, ..config.clone() };
            let map = of_pool.pool_map(layout).map_err(|error| match error {
                EngineError::PoolTooSmall { got, needed, .. } => {
                    WorkerError::DraftPool { got: ByteSize(got), needed: ByteSize(needed) }
                }
                error => error.into(),
            })?;
            let bounds = config.draft_model_config(spec.context);
            let pool_tokens = PoolShape::from(&map).tokens_max(config.chunk_tokens_max);
            let bounds = ModelConfig { model_len_max: bounds.model_len_max.min(pool_tokens), ..bounds };
            let model = Model::load(source.as_ref(), device.as_ref(), bounds, progress).map_err(EngineError::from)?;
            let memory = device.alloc_pool(&map)?;
            Ok(DraftModel::new(model, memory, &map)?)
        };
        load().map_err(of_draft)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::formats::{GgufModel, RandomModel};
    use std::path::Path;

    #[test]
    fn the_pool_is_a_share_or_what_is_set() {
        let mut engine = EngineSettings { kv_cache_bytes: ByteSize(1 << 30), ..EngineSettings::default() };
        assert_eq!(engine.draft_kv_bytes(), ByteSize(0));
        engine.speculation.draft_model = "random:".into();
        assert_eq!(engine.draft_kv_bytes(), ByteSize(1 << 28));
        engine.speculation.draft_kv_cache_bytes = ByteSize(1 << 20);
        assert_eq!(engine.draft_kv_bytes(), ByteSize(1 << 20));
    }

    /// What a worker says that does not start with this draft model.
    fn refusal(draft: &str, change: impl FnOnce(&mut EngineSettings)) -> String {
        let model = ModelSettings { model: "random:layers=1,vocab=299".into(), ..ModelSettings::default() };
        let mut engine = EngineSettings { kv_cache_bytes: ByteSize(4 << 20), ..EngineSettings::default() };
        engine.speculation.draft_model = draft.into();
        change(&mut engine);
        let refused = crate::bring_up::load(&model, &engine, &|_, _| ()).err();
        format!("{:#}", anyhow::Error::from(refused.expect("it is refused")))
    }

    #[test]
    fn one_that_cannot_be_used_ends_the_start_by_name() {
        let missing = refusal("/none/such.gguf", |_| ());
        assert!(missing.contains("draft_model") && missing.contains("/none/such.gguf"), "{missing}");
        let other = refusal("random:layers=1,vocab=298", |_| ());
        assert!(other.contains("draft_model") && other.contains("298") && other.contains("299"), "{other}");
        let same = "random:layers=1,vocab=299,seed=3";
        let small = refusal(same, |engine| engine.speculation.draft_kv_cache_bytes = ByteSize(1));
        assert!(small.contains("draft_kv_cache_bytes") && small.contains("at least"), "{small}");
        // Before the model is opened, and on any host.
        let gpu = refusal(same, |engine| engine.device = crate::settings::DeviceKind::Cuda(0));
        assert!(gpu.contains("draft_model") && gpu.contains("GPUs"), "{gpu}");
    }

    #[test]
    fn models_of_other_tokens_are_told_apart() {
        let random = |spec: &str| RandomModel::parse(spec).unwrap();
        let differs = |a: &dyn ModelSource, b: &dyn ModelSource| differs(a, b).unwrap();
        let same = differs(&random("random:layers=1,vocab=300"), &random("random:layers=2,vocab=300,seed=7"));
        assert_eq!(same, None);
        let fewer = differs(&random("random:vocab=300"), &random("random:vocab=301")).unwrap();
        assert!(fewer.contains("300") && fewer.contains("301"), "{fewer}");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/sentencepiece");
        let gguf = |name: &str| GgufModel::open(&folder.join(name).with_extension("gguf"), None).unwrap();
        let other = differs(&gguf("llama"), &gguf("gemma")).unwrap();
        assert!(other.starts_with("token ") && other.contains("in the model"), "{other}");
        assert_eq!(differs(&gguf("llama"), &gguf("llama")), None);
        let texts = format!("random:vocab={}", gguf("llama").spec().vocab);
        assert!(differs(&gguf("llama"), &random(&texts)).is_some_and(|why| why.starts_with("token ")));
        assert!(differs(&random("random:vocab=299"), &random("random:vocab=299")).is_none());
    }
}

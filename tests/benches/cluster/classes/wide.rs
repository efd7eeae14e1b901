//! The default model as if its file had all matrices in bf16.

use baton_engine::families::{DecoderSpec, TensorName};
use baton_engine::formats::{ModelSource, StoredTensor, TextSource, WeightsError};
use baton_kernels::numerics::round;
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, Dtype, SamplingDefaults, TokenId};

/// A model whose matrices are rounded to bf16.
pub(super) struct Wide<'a>(pub(super) &'a dyn ModelSource);

impl ModelSource for Wide<'_> {
    fn spec(&self) -> &DecoderSpec {
        self.0.spec()
    }

    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        if name.is_vector() {
            return self.0.stored(name);
        }
        let mut bytes = Vec::new();
        round::encode(Dtype::Bf16, &self.0.tensor(name)?, &mut bytes);
        Ok(StoredTensor { format: StorageFormat::Bf16, bytes: bytes.into() })
    }

    /// That of the file: what is computed here is neither packed on disk nor sent.
    fn fingerprint(&self) -> Digest {
        self.0.fingerprint()
    }

    fn end_tokens(&self) -> &[TokenId] {
        self.0.end_tokens()
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.0.sampling_defaults()
    }

    fn text(&self) -> TextSource {
        self.0.text()
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

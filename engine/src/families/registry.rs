//! The table of families.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::{
    deepseek, ernie4_5, gemma2, gemma3, gpt_oss, granite, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_5,
    qwen3_moe, smollm3,
};

/// Every supported family.
const FAMILIES: &[&Family] = &[
    &deepseek::V2,
    &deepseek::V3,
    &ernie4_5::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &gpt_oss::FAMILY,
    &granite::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &olmo2::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5::WITH_IMAGES,
    &qwen3_moe::FAMILY,
    &smollm3::FAMILY,
];

/// The family of a class in `architectures`.
pub(crate) fn by_class(class: &str) -> Option<&'static ConfigFamily> {
    FAMILIES.iter().map(|family| &family.config).find(|family| family.class == class)
}

/// The family of a `general.architecture`.
pub(crate) fn by_architecture(architecture: &str) -> Option<&'static GgufFamily> {
    FAMILIES.iter().filter_map(|family| family.gguf.as_ref()).find(|family| family.architecture == architecture)
}

/// All classes, for messages.
pub(crate) fn classes() -> String {
    FAMILIES.iter().map(|family| family.config.class).collect::<Vec<_>>().join(", ")
}

/// All architectures, for messages.
pub(crate) fn architectures() -> String {
    let names = FAMILIES.iter().filter_map(|family| family.gguf.as_ref()).map(|family| family.architecture);
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_name_has_one_family() {
        let names: Vec<_> = FAMILIES.iter().flat_map(|f| [f.config.class, f.config.model_type]).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
        let architectures = architectures();
        let names: Vec<_> = architectures.split(", ").collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
    }
}

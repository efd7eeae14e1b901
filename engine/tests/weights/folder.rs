//! A copy of a Hugging Face folder, mostly the tiny one, that tests change one thing at a time.

use crate::support::fixture;
use baton_engine::formats::{HuggingFaceModel, WeightsError};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";

/// A folder of its own, removed at the end.
pub(crate) struct Folder(TempDir);

/// Header and data of a safetensors file.
type Parts = (Map<String, Value>, Vec<u8>);

impl Folder {
    pub(crate) fn tiny() -> Self {
        Self::of(&fixture("tiny"))
    }

    /// A copy of `source`: its configuration and weights.
    pub(crate) fn of(source: &std::path::Path) -> Self {
        let folder = Self(tempfile::tempdir().expect("a temporary folder"));
        for name in ["config.json", WEIGHTS] {
            std::fs::copy(source.join(name), folder.0.path().join(name)).expect("the fixture");
        }
        folder
    }

    pub(crate) fn open(&self) -> Result<HuggingFaceModel, WeightsError> {
        HuggingFaceModel::open(self.0.path(), None)
    }

    #[allow(dead_code, reason = "the test of damaged files needs it")]
    pub(crate) fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    pub(crate) fn write(&mut self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a file of the folder")).expect("room for a folder");
        std::fs::write(path, content).expect("room for a small file");
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.path().join(name)).expect("a file of the folder")
    }

    pub(crate) fn remove(&mut self, name: &str) {
        std::fs::remove_file(self.0.path().join(name)).expect("a file of the folder");
    }

    /// Takes `bytes` off a file's end; more than there are leave one byte.
    pub(crate) fn cut(&mut self, name: &str, bytes: usize) {
        let content = self.read(name);
        self.write(name, &content[..content.len().saturating_sub(bytes).max(1)]);
    }

    pub(crate) fn edit(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(name)).expect("a JSON file");
        change(&mut value);
        self.write(name, value.to_string());
    }

    pub(crate) fn config(&mut self, key: &str, value: Value) {
        self.edit("config.json", |config| config[key] = value);
    }

    fn parts(&self) -> Parts {
        let file = self.read(WEIGHTS);
        let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
        let mut header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).expect("a header");
        header.remove("__metadata__");
        (header, file[8 + length..].to_vec())
    }

    fn pack(&mut self, name: &str, header: &Map<String, Value>, data: &[u8]) {
        let header = Value::Object(header.clone()).to_string();
        self.write(name, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat());
    }

    fn range(info: &Value) -> std::ops::Range<usize> {
        let end = |i: usize| info["data_offsets"][i].as_u64().expect("an offset") as usize;
        end(0)..end(1)
    }

    pub(crate) fn tensor_bytes(&self, name: &str) -> Vec<u8> {
        let (header, data) = self.parts();
        data[Self::range(&header[name])].to_vec()
    }

    pub(crate) fn add(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        let (mut header, mut data) = self.parts();
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
        self.pack(WEIGHTS, &header, &data);
    }

    pub(crate) fn drop_tensor(&mut self, name: &str) {
        let keep: Vec<String> = self.parts().0.keys().filter(|key| *key != name).cloned().collect();
        self.keep(WEIGHTS, &keep);
    }

    pub(crate) fn replace(&mut self, name: &str, dtype: &str, bytes: &[u8]) {
        let shape: Vec<usize> = serde_json::from_value(self.parts().0[name]["shape"].clone()).expect("a shape");
        self.drop_tensor(name);
        self.add(name, dtype, &shape, bytes);
    }

    /// Writes `file` with only these tensors.
    fn keep(&mut self, file: &str, names: &[String]) {
        let (header, data) = self.parts();
        let (mut kept, mut packed) = (Map::new(), Vec::new());
        for name in names {
            let mut info = header[name].clone();
            let bytes = &data[Self::range(&info)];
            info["data_offsets"] = json!([packed.len(), packed.len() + bytes.len()]);
            packed.extend(bytes);
            kept.insert(name.clone(), info);
        }
        self.pack(file, &kept, &packed);
    }

    /// Puts every other tensor into a second file, with an index over both.
    pub(crate) fn split(&mut self) {
        let names: Vec<String> = self.parts().0.keys().cloned().collect();
        let mut index = Map::new();
        for part in 0..2 {
            let file = format!("model-0000{}-of-2.safetensors", part + 1);
            let half: Vec<String> = names.iter().skip(part).step_by(2).cloned().collect();
            index.extend(half.iter().map(|name| (name.clone(), json!(file))));
            self.keep(&file, &half);
        }
        self.remove(WEIGHTS);
        self.write("model.safetensors.index.json", json!({"metadata": {}, "weight_map": index}).to_string());
    }
}

//! Input tensors: their elements, in either form, as the types that a request needs.

use super::messages::TENSORS_MAX;
use crate::request::PROMPTS_MAX;
use baton_proto::kserve::model_infer_request::InferInputTensor;
use baton_proto::kserve::{InferTensorContents, ModelInferRequest};
use baton_types::{RequestError, TokenId, shown};
use prost::bytes::{Buf as _, Bytes};

/// The datatypes that inputs have, by the protocol's names.
pub(super) const BOOL: &str = "BOOL";
pub(super) const BYTES: &str = "BYTES";
pub(super) const INT32: &str = "INT32";
pub(super) const INT64: &str = "INT64";
pub(super) const UINT32: &str = "UINT32";

/// The inputs of a request that were not read yet.
#[derive(Debug)]
pub(super) struct Tensors(Vec<Tensor>);

#[derive(Debug)]
pub(super) struct Tensor {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    elements: Elements,
}

#[derive(Debug)]
enum Elements {
    /// Little-endian, without padding.
    Raw(Bytes),
    Typed(InferTensorContents),
}

impl Tensors {
    /// Takes the inputs out of a request, each with its elements.
    pub(super) fn of(request: &mut ModelInferRequest) -> Result<Self, RequestError> {
        let raw = std::mem::take(&mut request.raw_input_contents);
        let inputs = std::mem::take(&mut request.inputs);
        if inputs.len() > TENSORS_MAX {
            return Err(RequestError::invalid("inputs", format!("inputs takes at most {TENSORS_MAX} tensors")));
        }
        if !raw.is_empty() && raw.len() != inputs.len() {
            let message = format!(
                "raw_input_contents has {} items for {} inputs: give one for each, or none",
                raw.len(),
                inputs.len()
            );
            return Err(RequestError::invalid("raw_input_contents", message));
        }
        let mut raw = raw.into_iter();
        let mut tensors: Vec<Tensor> = Vec::new();
        for InferInputTensor { name, datatype, shape, parameters, contents } in inputs {
            let named = format!("{name:.64}");
            if tensors.iter().any(|known| known.name == name) {
                return Err(RequestError::invalid(&*named, format!("two inputs have the name {named}")));
            }
            if let Some(parameter) = parameters.into_keys().next() {
                let message = format!(
                    "{named}: the parameter {parameter:.64} of an input is not supported: send its elements with the request"
                );
                return Err(RequestError::invalid(&*named, message));
            }
            let elements = match (raw.next(), contents) {
                (Some(raw), None) => Elements::Raw(raw),
                (None, Some(typed)) => Elements::Typed(typed),
                (Some(_), Some(_)) => {
                    let message = format!("{named} has contents beside raw_input_contents: send one of them");
                    return Err(RequestError::invalid(&*named, message));
                }
                (None, None) => {
                    let message = format!("{named} has no elements: send contents or raw_input_contents");
                    return Err(RequestError::invalid(&*named, message));
                }
            };
            tensors.push(Tensor { name, datatype, shape, elements });
        }
        Ok(Self(tensors))
    }

    /// Takes the tensor of this name.
    pub(super) fn take(&mut self, name: &str) -> Option<Tensor> {
        let at = self.0.iter().position(|tensor| tensor.name == name)?;
        Some(self.0.swap_remove(at))
    }

    /// The name of a tensor that nobody took.
    pub(super) fn left(&self) -> Option<&str> {
        self.0.first().map(|tensor| &*tensor.name)
    }
}

impl Tensor {
    fn refuse<T>(&self, reason: impl std::fmt::Display) -> Result<T, RequestError> {
        Err(RequestError::invalid(&*self.name, format!("{}: {reason}", self.name)))
    }

    fn check_type(&self, accepted: &[&str]) -> Result<(), RequestError> {
        if accepted.contains(&&*self.datatype) {
            return Ok(());
        }
        self.refuse(format!("the datatype must be {}, got {}", accepted.join(" or "), shown(&self.datatype)))
    }

    /// How many elements the shape has: that of `[n]`, and of `[n, 1]` or `[1, n]`.
    fn count(&self) -> Result<usize, RequestError> {
        let count = match self.shape[..] {
            [n] | [n, 1] | [1, n] => usize::try_from(n).ok(),
            _ => None,
        };
        count.map_or_else(|| self.refuse(format!("the shape must be [n], [n, 1] or [1, n], got {:?}", self.shape)), Ok)
    }

    fn check_count(&self, expected: usize, got: usize) -> Result<(), RequestError> {
        if expected == got {
            return Ok(());
        }
        self.refuse(format!("the shape {:?} has {expected} elements, and {got} came", self.shape))
    }

    fn check_raw(&self, raw: &[u8], expected: usize, element: usize) -> Result<(), RequestError> {
        if Some(raw.len()) == expected.checked_mul(element) {
            return Ok(());
        }
        let (shape, datatype, bytes) = (&self.shape, &self.datatype, raw.len());
        self.refuse(format!(
            "the shape {shape:?} of {datatype} has {expected} elements of {element} bytes, and {bytes} bytes came"
        ))
    }

    /// Texts of type BYTES, at least one.
    pub(super) fn texts(self) -> Result<Vec<String>, RequestError> {
        self.check_type(&[BYTES])?;
        let count = self.count()?;
        if !(1..=PROMPTS_MAX).contains(&count) {
            return self.refuse(format!("takes 1 to {PROMPTS_MAX} texts, got {count}; send several requests"));
        }
        let texts = match &self.elements {
            Elements::Raw(raw) => match elements(raw.clone(), count) {
                Ok(texts) => texts,
                Err(reason) => return self.refuse(reason),
            },
            Elements::Typed(typed) => {
                self.check_count(count, typed.bytes_contents.len())?;
                typed.bytes_contents.clone()
            }
        };
        let texts: Option<_> = texts.iter().map(|text| std::str::from_utf8(text).ok().map(str::to_owned)).collect();
        texts.map_or_else(|| self.refuse("a text is not UTF-8"), Ok)
    }

    /// One text.
    pub(super) fn text(self) -> Result<String, RequestError> {
        if self.count()? != 1 {
            return self.refuse(format!("takes one element, got the shape {:?}", self.shape));
        }
        Ok(self.texts()?.remove(0))
    }

    /// One value of type BOOL.
    pub(super) fn flag(self) -> Result<bool, RequestError> {
        self.check_type(&[BOOL])?;
        if self.count()? != 1 {
            return self.refuse(format!("takes one element, got the shape {:?}", self.shape));
        }
        match &self.elements {
            Elements::Raw(raw) => {
                self.check_raw(raw, 1, 1)?;
                Ok(raw[0] != 0)
            }
            Elements::Typed(typed) => {
                self.check_count(1, typed.bool_contents.len())?;
                Ok(typed.bool_contents[0])
            }
        }
    }

    /// Token ids.
    pub(super) fn ids(self) -> Result<Vec<TokenId>, RequestError> {
        self.check_type(&[INT64, INT32, UINT32])?;
        let count = self.count()?;
        let ids: Option<Vec<TokenId>> = match (&self.elements, &*self.datatype) {
            (Elements::Raw(raw), INT64) => {
                self.check_raw(raw, count, size_of::<i64>())?;
                raw.chunks_exact(size_of::<i64>()).map(|mut id| id.get_i64_le().try_into().ok()).collect()
            }
            (Elements::Raw(raw), INT32) => {
                self.check_raw(raw, count, size_of::<i32>())?;
                raw.chunks_exact(size_of::<i32>()).map(|mut id| id.get_i32_le().try_into().ok()).collect()
            }
            (Elements::Raw(raw), _) => {
                self.check_raw(raw, count, size_of::<u32>())?;
                Some(raw.chunks_exact(size_of::<u32>()).map(|mut id| id.get_u32_le()).collect())
            }
            (Elements::Typed(typed), INT64) => {
                self.check_count(count, typed.int64_contents.len())?;
                typed.int64_contents.iter().map(|id| (*id).try_into().ok()).collect()
            }
            (Elements::Typed(typed), INT32) => {
                self.check_count(count, typed.int_contents.len())?;
                typed.int_contents.iter().map(|id| (*id).try_into().ok()).collect()
            }
            (Elements::Typed(typed), _) => {
                self.check_count(count, typed.uint_contents.len())?;
                Some(typed.uint_contents.clone())
            }
        };
        ids.map_or_else(|| self.refuse("a token id is negative or over 32 bits"), Ok)
    }
}

/// Exactly `count` elements of type BYTES: each its length, in four bytes, and its bytes.
fn elements(mut raw: Bytes, count: usize) -> Result<Vec<Bytes>, String> {
    let mut found = Vec::new();
    while raw.has_remaining() && found.len() < count {
        let Ok(length) = raw.try_get_u32_le() else {
            return Err(format!("the length of element {} is cut off: it takes four bytes", found.len()));
        };
        let left = raw.len();
        if length as usize > left {
            return Err(format!("element {} has {length} bytes by its length, and {left} came", found.len()));
        }
        found.push(raw.split_to(length as usize));
    }
    match raw.len() {
        0 if found.len() == count => Ok(found),
        0 => Err(format!("the shape has {count} elements, and {} came", found.len())),
        more => Err(format!("{more} bytes follow the {count} elements of the shape")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What reading the only input gives, or the message that refuses it.
    fn read<T>(
        (datatype, shape): (&str, &[i64]),
        elements: Elements,
        as_type: impl FnOnce(Tensor) -> Result<T, RequestError>,
    ) -> Result<T, String> {
        let input = InferInputTensor {
            name: "x".into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            ..Default::default()
        };
        let mut request = ModelInferRequest { inputs: vec![input], ..Default::default() };
        match elements {
            Elements::Raw(raw) => request.raw_input_contents = vec![raw],
            Elements::Typed(typed) => request.inputs[0].contents = Some(typed),
        }
        let mut tensors = Tensors::of(&mut request).map_err(|e| e.message)?;
        let tensor = tensors.take("x").unwrap();
        assert_eq!(tensors.left(), None);
        as_type(tensor).map_err(|e| {
            assert_eq!(e.param.as_deref(), Some("x"));
            e.message
        })
    }

    fn raw(bytes: impl Into<Vec<u8>>) -> Elements {
        Elements::Raw(Bytes::from(bytes.into()))
    }

    fn typed(change: impl FnOnce(&mut InferTensorContents)) -> Elements {
        let mut contents = InferTensorContents::default();
        change(&mut contents);
        Elements::Typed(contents)
    }

    #[test]
    fn texts_are_read_in_both_forms() {
        let both = b"\x02\0\0\0hi\0\0\0\0".to_vec();
        for shape in [&[2][..], &[2, 1], &[1, 2]] {
            assert_eq!(read((BYTES, shape), raw(both.clone()), Tensor::texts).unwrap(), ["hi", ""]);
            let list = vec![Bytes::from("hi"), Bytes::new()];
            let contents = typed(|c| c.bytes_contents = list);
            assert_eq!(read((BYTES, shape), contents, Tensor::texts).unwrap(), ["hi", ""]);
        }
        assert_eq!(read((BYTES, &[1, 1]), raw(*b"\x02\0\0\0hi"), Tensor::text).unwrap(), "hi");
        let too_many = read((BYTES, &[2]), raw(both), Tensor::text).unwrap_err();
        assert!(too_many.contains("one element"), "{too_many}");
    }

    #[test]
    fn hostile_raw_texts_are_refused() {
        let cases: [(&[u8], &[i64], &str); 12] = [
            (b"", &[1], "has 1 elements, and 0 came"),
            (b"\x02\0\0", &[1], "cut off"),
            (b"\x03\0\0\0hi", &[1], "3 bytes by its length, and 2 came"),
            (b"\xff\xff\xff\xffhi", &[1], "4294967295 bytes"),
            (b"\x01\0\0\0hi", &[1], "1 bytes follow"),
            (b"\x02\0\0\0hi\x01\0", &[2], "cut off"),
            (b"\x02\0\0\0\xff\xfe", &[1], "UTF-8"),
            (b"\x02\0\0\0hi", &[0], "1 to 256 texts"),
            (b"\x02\0\0\0hi", &[-1], "the shape must be"),
            (b"\x02\0\0\0hi", &[], "the shape must be"),
            (b"\x02\0\0\0hi", &[1, 1, 1], "the shape must be"),
            (b"\x02\0\0\0hi", &[i64::MAX], "1 to 256 texts"),
        ];
        for (bytes, shape, says) in cases {
            let refused = read((BYTES, shape), raw(bytes), Tensor::texts).unwrap_err();
            assert!(refused.contains(says), "{bytes:?} {shape:?}: {refused}");
        }
        let wrong = read((INT64, &[1]), raw(*b"\x02\0\0\0hi"), Tensor::texts).unwrap_err();
        assert!(wrong.contains("must be BYTES"), "{wrong}");
        let long = read((&"X".repeat(1000), &[1]), raw(*b""), Tensor::texts).unwrap_err();
        assert!(long.len() < 400, "{long}");
    }

    #[test]
    fn flags_and_ids_have_their_size() {
        assert!(read((BOOL, &[1]), raw([1]), Tensor::flag).unwrap());
        assert!(!read((BOOL, &[1, 1]), typed(|c| c.bool_contents = vec![false]), Tensor::flag).unwrap());
        for (bytes, shape) in [(vec![], 1), (vec![1, 1], 1), (vec![1, 1], 2)] {
            assert!(read((BOOL, &[shape]), raw(bytes), Tensor::flag).is_err());
        }
        assert!(read((BOOL, &[1]), typed(|_| ()), Tensor::flag).is_err());
        assert!(read((BYTES, &[1]), raw([1]), Tensor::flag).unwrap_err().contains("BOOL"));

        let wide: Vec<u8> = [5_i64, 7].iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(read((INT64, &[1, 2]), raw(wide.clone()), Tensor::ids).unwrap(), [5, 7]);
        assert_eq!(read((INT32, &[1]), raw(9_i32.to_le_bytes()), Tensor::ids).unwrap(), [9]);
        assert_eq!(read((UINT32, &[1]), raw(9_u32.to_le_bytes()), Tensor::ids).unwrap(), [9]);
        assert_eq!(read((INT64, &[2]), typed(|c| c.int64_contents = vec![1, 2]), Tensor::ids).unwrap(), [1, 2]);
        assert_eq!(read((INT32, &[1]), typed(|c| c.int_contents = vec![3]), Tensor::ids).unwrap(), [3]);
        assert_eq!(read((UINT32, &[1]), typed(|c| c.uint_contents = vec![3]), Tensor::ids).unwrap(), [3]);
        for (bytes, shape, says) in [
            (wide.clone(), 3, "16 bytes came"),
            (wide[..15].to_vec(), 2, "15 bytes came"),
            ((-1_i64).to_le_bytes().to_vec(), 1, "negative"),
            ((1_i64 << 32).to_le_bytes().to_vec(), 1, "over 32 bits"),
            (wide, i64::MAX, "16 bytes came"),
        ] {
            let refused = read((INT64, &[shape]), raw(bytes), Tensor::ids).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
        assert!(read((INT64, &[1]), typed(|c| c.int64_contents = vec![1, 2]), Tensor::ids).is_err());
        assert!(read((INT64, &[1]), typed(|c| c.int_contents = vec![1]), Tensor::ids).is_err(), "another list");
    }

    #[test]
    fn each_input_has_elements_once() {
        let input = |name: &str, contents| InferInputTensor { name: name.into(), contents, ..Default::default() };
        let full = || Some(InferTensorContents::default());
        let check = |inputs: Vec<InferInputTensor>, raw: usize| {
            let raw_input_contents = vec![Bytes::new(); raw];
            let mut request = ModelInferRequest { inputs, raw_input_contents, ..Default::default() };
            Tensors::of(&mut request).map(|_| ()).map_err(|e| e.message)
        };
        assert_eq!(check(vec![input("a", None), input("b", None)], 2), Ok(()));
        assert_eq!(check(vec![input("a", full()), input("b", full())], 0), Ok(()));
        for (inputs, raw, says) in [
            (vec![input("a", None)], 2, "2 items for 1 inputs"),
            (vec![input("a", None), input("b", None)], 1, "1 items for 2 inputs"),
            (vec![input("a", None)], 0, "no elements"),
            (vec![input("a", full())], 1, "beside raw_input_contents"),
            (vec![input("a", full()), input("a", full())], 0, "two inputs have the name a"),
            (vec![], 1, "1 items for 0 inputs"),
        ] {
            let refused = check(inputs, raw).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
        let shared = [("shared_memory_region".to_owned(), Default::default())].into();
        let tensor = InferInputTensor { parameters: shared, ..input("a", full()) };
        assert!(check(vec![tensor], 0).unwrap_err().contains("shared_memory_region"));
    }
}

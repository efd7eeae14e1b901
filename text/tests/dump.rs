mod common;
#[test]
fn dump() {
    std::fs::write("/tmp/smollm.bundle", baton_text::bundle::encode(&baton_text::bundle::from_gguf(&common::gguf()).unwrap())).unwrap();
    let text: String = common::corpus::Corpus::new(9).take(4000).flat_map(|l| [l, "\n".into()]).collect();
    std::fs::write("/tmp/mixed.txt", text).unwrap();
}

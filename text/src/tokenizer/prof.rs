#[test]
fn prof() {
    use super::*;
    let cpu = || -> f64 { std::fs::read_to_string("/proc/thread-self/schedstat").unwrap().split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9 };
    let bundle: TextBundle = crate::bundle::decode(&std::fs::read("/tmp/smollm.bundle").unwrap()).unwrap();
    let t0 = cpu();
    let t = Tokenizer::from_bundle(&bundle).unwrap();
    eprintln!("load {:.3}", cpu() - t0);
    let Parts { inner, byte_level: Some(b), .. } = &*t.0 else { panic!() };
    let ModelWrapper::BPE(model) = inner.get_model() else { panic!() };
    let t0 = cpu();
    let head: Head = serde_json::from_str(&bundle.tokenizer_json).unwrap();
    eprintln!("head {:.3}", cpu() - t0);
    let t0 = cpu();
    super::byte_level::ByteLevel::new(&head.normalizer, &head.pre_tokenizer, model, head.model.merges.unwrap(), &t.0.vocab).unwrap();
    eprintln!("byte level {:.3}", cpu() - t0);
    for file in ["prose", "code", "mixed"] {
        let text = std::fs::read_to_string(format!("/tmp/{file}.txt")).unwrap();
        let time = |what: &str, f: &mut dyn FnMut()| {
            f();
            let (t0, mut n) = (cpu(), 0);
            while cpu() - t0 < 0.4 { f(); n += 1; }
            eprintln!("{file} {what}: {:.2} MB/s", text.len() as f64 * n as f64 / (cpu() - t0) / 1e6);
        };
        let mut words = 0usize;
        time("split", &mut || { b.splitter.split(&text, &mut |_| { words += 1; Ok::<(), ()>(()) }).unwrap(); });
        let mut list = Vec::new();
        b.splitter.split(&text, &mut |w| { list.push(w.to_owned()); Ok::<(), ()>(()) }).unwrap();
        eprintln!("words {} bytes a word {}", list.len(), text.len() / list.len());
        let (mut s, mut ids) = (Scratch::default(), Vec::new());
        time("merge only", &mut || { ids.clear(); for w in &list { b.merges.merge(w.as_bytes(), &mut s, &mut ids) } });
        time("lookup and merge", &mut || { ids.clear(); for w in &list { b.merges.encode(w.as_bytes(), &t.0.vocab, &mut s, &mut ids) } });
        time("added", &mut || { std::hint::black_box(t.0.added.split_raw(&text, &[])); });
        time("all", &mut || { std::hint::black_box(t.encode(&text, Specials::AsText).unwrap()); });
        time("library", &mut || { std::hint::black_box(t.encode_any(&text, &[]).unwrap()); });
    }
}

//! The headers of kernels are those that the host's structs make.

use baton_kernels::cuda::headers;
use expect_test::expect_file;

#[test]
fn headers_are_those_of_the_structs() {
    for (name, text) in headers() {
        let path = format!("{}/cu/params/{name}", env!("CARGO_MANIFEST_DIR"));
        expect_file![path].assert_eq(&text);
    }
}

//! Arguments of the kernels: one struct for each, passed by value.
//!
//! The headers in `kernels/cu/params` are generated from these structs, so that host and device can't disagree about a field.

pub(crate) mod known;
pub(crate) mod model;
pub(crate) mod pool;
pub(crate) mod sampling;

use std::fmt;
use std::marker::PhantomData;

/// An address in device memory. The host must not follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Address(pub(crate) u64);

impl Address {
    /// So many bytes further.
    pub(crate) const fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// An element type of device memory.
pub(crate) trait Element: Copy + fmt::Debug + 'static {
    /// Its name in C.
    #[cfg(any(test, feature = "testing"))]
    const C: &'static str;
}

/// A byte of memory of any type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Any;

macro_rules! elements {
    ($($rust:ty = $c:literal),*) => { $(
        impl Element for $rust {
            #[cfg(any(test, feature = "testing"))]
            const C: &'static str = $c;
        }
    )* };
}
elements!(u8 = "u8", u16 = "u16", i32 = "i32", u32 = "u32", u64 = "u64", f32 = "f32", Any = "void");

/// A pointer to elements that a kernel reads; null if optional and absent.
#[derive(Debug)]
pub(crate) struct In<T>(u64, PhantomData<T>);

/// A pointer to elements that a kernel writes, or reads and writes.
#[derive(Debug)]
pub(crate) struct Out<T>(u64, PhantomData<T>);

macro_rules! pointers {
    ($($pointer:ident),*) => { $(
        impl<T> Clone for $pointer<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $pointer<T> {}

        impl<T> PartialEq for $pointer<T> {
            fn eq(&self, other: &Self) -> bool {
                self.0 == other.0
            }
        }

        impl<T> $pointer<T> {
            /// To the memory at this address.
            pub(crate) const fn at(address: Address) -> Self {
                Self(address.0, PhantomData)
            }

            /// The address as a number.
            pub(crate) const fn bits(self) -> u64 {
                self.0
            }

            /// Where it points to; `None` if it is null.
            #[cfg(any(test, feature = "testing"))]
            pub(crate) const fn address(self) -> Option<Address> {
                if self.0 == 0 { None } else { Some(Address(self.0)) }
            }
        }
    )* };
}
pointers!(In, Out);

impl<T> In<T> {
    /// To nothing.
    pub(crate) const fn null() -> Self {
        Self(0, PhantomData)
    }
}

/// A value that is passed to a kernel.
pub(crate) trait Argument: Sized {
    /// Bytes, which are also a multiple of its alignment.
    const BYTES: usize;

    /// How C declares `name`.
    #[cfg(any(test, feature = "testing"))]
    fn declare(name: &str) -> String;

    /// Appends its bytes.
    fn append(&self, to: &mut Vec<u8>);

    /// Takes it from the front of `bytes`.
    ///
    /// # Panics
    /// If there are too few.
    fn take(bytes: &mut &[u8]) -> Self;
}

/// The next `N` bytes.
fn next<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (first, rest) = bytes.split_first_chunk().expect("as many bytes as an argument has");
    *bytes = rest;
    *first
}

impl<T: Element> Argument for In<T> {
    const BYTES: usize = 8;
    #[cfg(any(test, feature = "testing"))]
    fn declare(name: &str) -> String {
        format!("const {} *{name}", T::C)
    }

    fn append(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.0.to_ne_bytes());
    }

    fn take(bytes: &mut &[u8]) -> Self {
        Self(u64::from_ne_bytes(next(bytes)), PhantomData)
    }
}

impl<T: Element> Argument for Out<T> {
    const BYTES: usize = 8;
    #[cfg(any(test, feature = "testing"))]
    fn declare(name: &str) -> String {
        format!("{} *{name}", T::C)
    }

    fn append(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.0.to_ne_bytes());
    }

    fn take(bytes: &mut &[u8]) -> Self {
        Self(u64::from_ne_bytes(next(bytes)), PhantomData)
    }
}

macro_rules! numbers {
    ($($rust:ty = $c:literal),*) => { $(
        impl Argument for $rust {
            const BYTES: usize = size_of::<$rust>();
            #[cfg(any(test, feature = "testing"))]
            fn declare(name: &str) -> String {
                format!(concat!($c, " {}"), name)
            }

            fn append(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_ne_bytes());
            }

            fn take(bytes: &mut &[u8]) -> Self {
                Self::from_ne_bytes(next(bytes))
            }
        }
    )* };
}
numbers!(i32 = "i32", i64 = "i64", u32 = "u32", u64 = "u64", f32 = "f32");

impl<T: Argument, const N: usize> Argument for [T; N] {
    const BYTES: usize = T::BYTES * N;
    #[cfg(any(test, feature = "testing"))]
    fn declare(name: &str) -> String {
        T::declare(&format!("{name}[{N}]"))
    }

    fn append(&self, to: &mut Vec<u8>) {
        self.iter().for_each(|element| element.append(to));
    }

    fn take(bytes: &mut &[u8]) -> Self {
        std::array::from_fn(|_| T::take(bytes))
    }
}

/// The bytes of several, one after another.
pub(crate) fn bytes_of<T: Argument>(all: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(all.len() * T::BYTES);
    all.iter().for_each(|each| each.append(&mut bytes));
    bytes
}

/// Declares structs of arguments, and `DECLARATIONS`, what their header says.
macro_rules! arguments {
    ($(
        $(#[doc = $doc:literal])*
        struct $name:ident {
            $( $(#[doc = $field_doc:literal])* $field:ident: $type:ty, )*
        }
    )*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug, PartialEq)]
            #[repr(C)]
            pub(crate) struct $name {
                $( $(#[doc = $field_doc])* pub(crate) $field: $type, )*
            }

            // Fields of eight bytes begin at a multiple of eight, and nothing is padded: C lays it out alike.
            const _: () = {
                let mut at = 0;
                $(
                    let bytes = <$type as $crate::cuda::arguments::Argument>::BYTES;
                    assert!(at % (if bytes % 8 == 0 { 8 } else { 4 }) == 0, "a field would be padded");
                    at += bytes;
                )*
                assert!(at % 8 == 0, "the end would be padded");
            };

            impl $crate::cuda::arguments::Argument for $name {
                const BYTES: usize = 0 $(+ <$type as $crate::cuda::arguments::Argument>::BYTES)*;
                #[cfg(any(test, feature = "testing"))]
                fn declare(name: &str) -> String {
                    format!(concat!(stringify!($name), " {}"), name)
                }

                fn append(&self, to: &mut Vec<u8>) {
                    $( $crate::cuda::arguments::Argument::append(&self.$field, to); )*
                }

                fn take(bytes: &mut &[u8]) -> Self {
                    Self { $( $field: $crate::cuda::arguments::Argument::take(bytes), )* }
                }
            }
        )*

        /// Each struct's comment, name, fields with their comments, and size.
        #[cfg(any(test, feature = "testing"))]
        pub(crate) fn declarations() -> Vec<$crate::cuda::arguments::Declaration> {
            use $crate::cuda::arguments::{Argument, Declaration, concat_docs};
            vec![$(
                Declaration {
                    doc: concat_docs(&[$($doc),*]),
                    name: stringify!($name),
                    fields: vec![$((concat_docs(&[$($field_doc),*]), <$type as Argument>::declare(stringify!($field)))),*],
                    bytes: <$name as Argument>::BYTES,
                }
            ),*]
        }
    };
}
pub(crate) use arguments;

/// Lines of a comment as one.
#[cfg(any(test, feature = "testing"))]
fn concat_docs(lines: &[&str]) -> String {
    lines.concat()
}

/// A struct as its header says it.
#[cfg(any(test, feature = "testing"))]
pub(crate) struct Declaration {
    pub(crate) doc: String,
    pub(crate) name: &'static str,
    /// Comment and declaration.
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) bytes: usize,
}

#[cfg(any(test, feature = "testing"))]
impl Declaration {
    pub(crate) fn text(&self) -> String {
        let mut text = format!("//{}\nstruct {} {{\n", self.doc, self.name);
        for (doc, field) in &self.fields {
            let doc = if doc.is_empty() { String::new() } else { format!(" //{doc}") };
            text += &format!("    {field};{doc}\n");
        }
        text +=
            &format!("}};\nstatic_assert(sizeof({}) == {}, \"as the host lays it out\");\n\n", self.name, self.bytes);
        text
    }
}

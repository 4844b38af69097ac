//! Owns the typed headers of requests: which fields a request has, which it must have.
//!
//! Invariant: a missing or malformed mandatory field is an error that names it; unknown fields
//! are ignored. Send and pull headers are decoded without allocation.

/// Defines a request header: kinds `need_str`, `need_i32`, `need_i64` and `need_bool` are
/// mandatory fields, `str`, `i32`, `i64` and `bool` may be absent.
macro_rules! request {
    (@type $lifetime:lifetime need_str) => { std::borrow::Cow<$lifetime, str> };
    (@type $lifetime:lifetime str) => { Option<std::borrow::Cow<$lifetime, str>> };
    (@type $lifetime:lifetime need_i32) => { i32 };
    (@type $lifetime:lifetime i32) => { Option<i32> };
    (@type $lifetime:lifetime need_i64) => { i64 };
    (@type $lifetime:lifetime i64) => { Option<i64> };
    (@type $lifetime:lifetime need_bool) => { bool };
    (@type $lifetime:lifetime bool) => { Option<bool> };
    (@read $ext:ident str $name:literal) => { $ext.str($name) };
    (@read $ext:ident $kind:ident $name:literal) => { $ext.$kind($name)? };
    ($(
        $(#[$about:meta])*
        $request:ident { $($field:ident: $kind:ident $name:literal),* $(,)? }
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct $request<'a> {
            $(
                #[doc = concat!("Header field `", $name, "`.")]
                pub $field: request!(@type 'a $kind),
            )*
            /// Ties the header to its frame where no field borrows from it.
            #[doc(hidden)]
            pub frame: std::marker::PhantomData<&'a ()>,
        }

        impl<'a> $request<'a> {
            /// Reads the header from its ext fields.
            pub fn decode(
                ext: &$crate::header::Ext<'a>,
            ) -> Result<Self, $crate::header::FieldError> {
                Ok(Self {
                    $($field: request!(@read ext $kind $name),)*
                    frame: std::marker::PhantomData,
                })
            }
        }
    )*};
}

mod admin;
mod client;
mod name_server;
mod pull;
mod send;

pub use admin::*;
pub use client::*;
pub use name_server::*;
pub use pull::PullRequest;
pub use send::SendRequest;

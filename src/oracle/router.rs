//! The meaning of routers.

//! Recording work into a graph and replaying it.

use super::device::Device;
use super::driver::Handle;
use super::stream::Stream;
use crate::error::Result;

/// Work that was recorded once and can be launched many times.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    graph: Handle,
    executable: Handle,
}

// SAFETY: handles may move between threads; launches are only made through `&self` with a stream, which the driver orders.
unsafe impl Send for Graph {}

/// Ends a capture that an error or a panic left open, so that the stream stays usable.
struct Capture<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Handle> {
        let mut graph = std::ptr::null_mut();
        self.is_open = false;
        let _bound = self.stream.device().bind()?;
        // SAFETY: the capture of this stream was begun on this thread.
        unsafe { self.stream.device().driver().stream_end_capture(self.stream.raw(), &mut graph) }?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(graph) = self.end()
            && !graph.is_null()
        {
            // SAFETY: the half-made graph is ours alone.
            let _ = unsafe { self.stream.device().driver().graph_destroy(graph) };
        }
    }
}

impl Graph {
    /// Records what `work` queues on the stream, instead of running it. An error of `work` ends the recording and comes back.
    ///
    /// Other threads may go on using the driver meanwhile (spec: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
    pub fn capture(stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let device = stream.device();
        let driver = device.driver();
        let _bound = device.bind()?;
        // SAFETY: the stream is alive; 1 is the thread-local mode.
        unsafe { driver.stream_begin_capture(stream.raw(), 1) }?;
        let mut capture = Capture { stream, is_open: true };
        work()?;
        let graph = capture.end()?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just recorded; `executable` outlives the call.
        if let Err(error) = unsafe { driver.graph_instantiate(&mut executable, graph, 0) } {
            // SAFETY: the graph is ours alone.
            unsafe { driver.graph_destroy(graph) }?;
            return Err(error);
        }
        let graph = Graph { device: device.clone(), graph, executable };
        // SAFETY: both are alive; the first launch then costs what later ones do.
        unsafe { driver.graph_upload(graph.executable, stream.raw()) }?;
        Ok(graph)
    }

    /// Queues the recorded work. The memory that it uses must still be there.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both are alive.
        unsafe { self.device.driver().graph_launch(self.executable, stream.raw()) }
    }

    /// Kernels, copies and fills that were recorded.
    pub fn num_nodes(&self) -> Result<usize> {
        let mut num_nodes = 0;
        let _bound = self.device.bind()?;
        // SAFETY: a null list asks for the number alone.
        unsafe { self.device.driver().graph_num_nodes(self.graph, std::ptr::null_mut(), &mut num_nodes) }?;
        Ok(num_nodes)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: made by `capture`, and this is the only owner. Replays in flight finish (spec: cuGraphExecDestroy). Failures leave nothing to do.
            let _ = unsafe { self.device.driver().graph_executable_destroy(self.executable) };
            // SAFETY: as above.
            let _ = unsafe { self.device.driver().graph_destroy(self.graph) };
        }
    }
}

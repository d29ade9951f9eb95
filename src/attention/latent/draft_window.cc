// The caches and the attention of a draft layer.
#include "src/attention/latent/draft_window.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/attention/latent/latent_views.h"
#include "src/attention/latent/sparse_mla_rows.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

int64_t BlocksFor(int64_t tokens, int block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

const CacheKind& EntryKind(const DraftWindow::Options& options) {
  return options.layout->kinds[kLatentKind];
}

}  // namespace

// The ring holds a window and the rows of a step beyond it: an entry is overwritten only when no
// decode row of the step attends to it any more.
DraftWindow::DraftWindow(const Options& options)
    : options_(options),
      window_(static_cast<int32_t>(std::min(options.window, options.max_context))),
      blocks_(BlocksFor(options.max_context, EntryKind(options).block_tokens)),
      ring_blocks_(std::min(
          blocks_, BlocksFor(window_ + kernels::kMaxNewTokens, EntryKind(options).block_tokens))) {}

int64_t DraftWindow::CacheBytes(const Options& options) {
  return options.slots * DraftWindow(options).ring_blocks_ * EntryKind(options).page_bytes();
}

absl::StatusOr<std::unique_ptr<DraftWindow>> DraftWindow::Create(const Options& options) {
  SLUICE_CHECK(HasLatents(*options.layout) && options.slots > 0 && options.max_rows > 0);
  std::unique_ptr<DraftWindow> made(new DraftWindow(options));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  made->FillTable();
  return made;
}

absl::Status DraftWindow::Allocate() {
  const auto words = [this](MemoryKind kind, int64_t count, const char* what, Buffer* to) {
    return BufferAllocator(options_.device, what).Words(kind, count, to);
  };
  const int64_t slots = options_.slots;
  const int64_t bytes = CacheBytes(options_);
  SLUICE_RETURN_IF_ERROR(
      words(MemoryKind::kDevice, (bytes + 3) / 4, "caches of the draft layer", &entries_));
  SLUICE_RETURN_IF_ERROR(
      words(MemoryKind::kDevice, slots * blocks_, "pages of the draft layer", &table_));
  for (auto [kind, to] :
       {std::pair{MemoryKind::kDevice, &begins_}, std::pair{MemoryKind::kPinned, &host_begins_}}) {
    SLUICE_RETURN_IF_ERROR(words(kind, slots, "beginnings of the draft layer's caches", to));
  }
  SLUICE_RETURN_IF_ERROR(words(MemoryKind::kDevice, int64_t{options_.max_rows} * (window_ + 1),
                               "lists of the draft layer", &lists_));
  const int64_t scratch = options_.device->kernels().SparseMlaScratchBytes(
      options_.decode_rows, options_.heads, options_.rank, window_);
  SLUICE_ASSIGN_OR_RETURN(
      scratch_, options_.device->Allocate(MemoryKind::kDevice, static_cast<size_t>(scratch),
                                          "scratch of the draft layer"));
  return absl::OkStatus();
}

void DraftWindow::FillTable() {
  const int64_t count = options_.slots * blocks_;
  std::vector<int32_t> pages(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    pages[static_cast<size_t>(i)] =
        static_cast<int32_t>(i / blocks_ * ring_blocks_ + i % blocks_ % ring_blocks_);
  }
  const std::unique_ptr<Stream> stream = options_.device->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = options_.device->NewEvent();
  stream->Copy(table_.data(), pages.data(), pages.size() * sizeof(int32_t));
  stream->Record(*done);
  done->Wait();
}

void DraftWindow::Begin(Stream& stream, int slot, int32_t first) {
  host_begins_.as<int32_t>()[slot] = first;
  stream.Copy(begins_.as<int32_t>() + slot, host_begins_.as<int32_t>() + slot, sizeof(int32_t));
}

kernels::PagedLatents DraftWindow::Entries() const {
  const CacheKind& kind = EntryKind(options_);
  kernels::PagedLatents out{};
  out.base = entries_.data();
  out.block_table = table_.as<int32_t>();
  out.table_stride = blocks_;
  out.page_bytes = kind.page_bytes();
  out.block_tokens = kind.block_tokens;
  out.rank = options_.rank;
  out.rope = options_.rope;
  out.type = kind.element_type;
  return out;
}

void DraftWindow::AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                               int32_t /*first_row*/) {
  SLUICE_CHECK(layer == 0);
  params.cache = Entries();
  params.place_of = {};
  params.written = nullptr;
  options_.device->kernels().LatentAppend(stream, params);
}

void DraftWindow::AppendIndex(Stream&, int, kernels::IndexAppendParams) {
  SLUICE_CHECK(false, "the draft layer is loaded without its indexer");
}

void DraftWindow::AttendLatent(Stream& stream, int layer, const Params& attention) {
  SLUICE_CHECK(layer == 0 && attention.rows <= options_.max_rows);
  kernels::NewestListsParams newest{};
  newest.slots = attention.slots;
  newest.positions = attention.positions;
  newest.begins = begins_.as<int32_t>();
  newest.lists.units = lists_.as<int32_t>();
  newest.lists.counts = lists_.as<int32_t>() + int64_t{options_.max_rows} * window_;
  newest.lists.capacity = window_;
  newest.rows = attention.rows;
  options_.device->kernels().NewestLists(stream, newest);
  attention.make_queries(stream);

  kernels::SparseMlaParams mla =
      SparseMlaOfRows(attention, Entries(), options_.device->kernels().activation_type(), scratch_);
  mla.entries = newest.lists.units;
  mla.counts = newest.lists.counts;
  mla.capacity = window_;
  options_.device->kernels().SparseMla(stream, mla);
}

}  // namespace sluice

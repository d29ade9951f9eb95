#include "src/model/row_exchange.h"

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::Status RowExchange::Allocate(Workspace& workspace, int max_rows) {
  const int64_t ranks = options_.ranks, all = ranks * max_rows, k = options_.choices;
  const int64_t unit = unit_bytes();
  struct Wanted {
    Buffer* buffer;
    int64_t rows, row_bytes;
    const char* what;
  };
  const Wanted wanted[] = {
      {&sent_, all, unit, "rows to other ranks"},
      {&arrived_, all, unit, "rows of other ranks"},
      {&sent_counts_, ranks, 4, "numbers of rows to other ranks"},
      {&arrived_counts_, ranks, 4, "numbers of rows of other ranks"},
      {&returned_counts_, ranks, 4, "numbers of sums of other ranks"},
      {&places_, max_rows, ranks * 4, "places of rows"},
      {&x_, all, options_.dim * ops_.activation_bytes(), "activations of other ranks"},
      {&chosen_, all, k * 4, "other ranks' choices"},
      {&weights_, all, k * 4, "weights of other ranks' choices"},
      {&pairs_, all, k * 4, "rows by experts"},
      {&begins_, int64_t{options_.experts_each} + 1, 4, "experts"},
      {&sums_, all, int64_t{options_.dim} * 4, "sums for other ranks"},
      {&returned_, all, int64_t{options_.dim} * 4, "sums of other ranks"}};
  for (const Wanted& w : wanted) {
    SLUICE_RETURN_IF_ERROR(workspace.Allocate(w.buffer, w.rows, w.row_bytes, w.what));
  }
  if (group_ == nullptr) return absl::OkStatus();
  for (Buffer* buffer : {&sent_, &arrived_, &sums_, &returned_}) {
    SLUICE_RETURN_IF_ERROR(group_->Register(buffer->data(), buffer->bytes()));
  }
  return absl::OkStatus();
}

int64_t RowExchange::unit_bytes() const {
  return kernels::RowUnitOf(options_.dim, options_.choices, options_.type).bytes;
}

void RowExchange::Pack(Stream& stream, const Rows& rows) {
  rows_ = rows;
  kernels::PackRowsParams pack{};
  pack.x = rows.x;
  pack.chosen = rows.chosen;
  pack.weights = rows.weights;
  pack.physical = rows.physical;
  pack.load = rows.load;
  pack.units = sent_.data();
  pack.counts = sent_counts_.as<int32_t>();
  pack.places = places_.as<int32_t>();
  pack.rows = rows.rows;
  pack.dim = options_.dim;
  pack.choices = options_.choices;
  pack.ranks = options_.ranks;
  pack.capacity = rows.most_rows;
  pack.experts_each = options_.experts_each;
  pack.x_type = ops_.activation_type();
  pack.type = options_.type;
  ops_.kernels().PackRows(stream, pack);
}

void RowExchange::Move(Stream& stream, const Buffer& send, const Buffer& send_counts,
                       const Buffer& receive, const Buffer& receive_counts, int64_t unit_bytes) {
  SLUICE_CHECK(group_ != nullptr, "divided experts compute with their ranks");
  AllToAllParams move;
  move.send = send.data();
  move.send_counts = send_counts.as<int32_t>();
  move.receive = receive.data();
  move.receive_counts = receive_counts.as<int32_t>();
  move.capacity = rows_.most_rows;
  move.unit_bytes = static_cast<int32_t>(unit_bytes);
  group_->AllToAll(stream, move);
}

void RowExchange::Dispatch(Stream& stream) {
  Move(stream, sent_, sent_counts_, arrived_, arrived_counts_, unit_bytes());
}

RowExchange::Arrived RowExchange::Unpack(Stream& stream) {
  kernels::UnpackRowsParams unpack{};
  unpack.units = arrived_.data();
  unpack.counts = arrived_counts_.as<int32_t>();
  unpack.x = x_.data();
  unpack.sums = sums_.as<float>();
  unpack.chosen = chosen_.as<int32_t>();
  unpack.weights = weights_.as<float>();
  unpack.pairs = pairs_.as<int32_t>();
  unpack.begins = begins_.as<int32_t>();
  unpack.dim = options_.dim;
  unpack.choices = options_.choices;
  unpack.ranks = options_.ranks;
  unpack.capacity = rows_.most_rows;
  unpack.experts_each = options_.experts_each;
  unpack.x_type = ops_.activation_type();
  unpack.type = options_.type;
  ops_.kernels().UnpackRows(stream, unpack);
  Arrived arrived;
  arrived.x = unpack.x;
  arrived.chosen = unpack.chosen;
  arrived.weights = unpack.weights;
  arrived.pairs = unpack.pairs;
  arrived.begins = unpack.begins;
  arrived.sums = unpack.sums;
  arrived.rows = options_.ranks * rows_.most_rows;
  return arrived;
}

void RowExchange::Return(Stream& stream) {
  Move(stream, sums_, arrived_counts_, returned_, returned_counts_, int64_t{options_.dim} * 4);
}

void RowExchange::Add(Stream& stream) {
  kernels::AddPartsParams add{};
  add.parts = returned_.as<float>();
  add.places = places_.as<int32_t>();
  add.out = rows_.out;
  add.rows = rows_.rows;
  add.ranks = options_.ranks;
  add.dim = options_.dim;
  ops_.kernels().AddParts(stream, add);
}

}  // namespace sluice

#include "src/service/ingest/write_parser.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "sluice/v1/ingest.pb.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr uint32_t Tag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

absl::Status ToUint32(const char* field, uint64_t value, uint32_t* out) {
  if (value > UINT32_MAX) {
    return InvalidField(field, absl::StrCat("expected less than 2^32, found ", value));
  }
  *out = static_cast<uint32_t>(value);
  return absl::OkStatus();
}

absl::Status ReadHeader(CodedInputStream& in, ChunkHeader* out) {
  uint32_t bytes = 0;
  std::string text;
  if (!in.ReadVarint32(&bytes)) return InvalidField("header", "its length is not readable");
  if (bytes > kMaxChunkHeaderBytes) {
    return InvalidField("header", absl::StrCat("at most ", kMaxChunkHeaderBytes,
                                               " bytes are expected, found ", bytes));
  }
  v1::ChunkHeader header;
  if (!in.ReadString(&text, static_cast<int>(bytes))) {
    return InvalidField("header", "the message ends inside it");
  }
  if (!header.ParseFromString(text)) return InvalidField("header", "is not a ChunkHeader");
  out->transfer_id = std::move(*header.mutable_transfer_id());
  out->kind = std::move(*header.mutable_kind());
  SLUICE_RETURN_IF_ERROR(ToUint32("header.layer", header.layer(), &out->layer));
  SLUICE_RETURN_IF_ERROR(ToUint32("header.head_begin", header.head_begin(), &out->head_begin));
  SLUICE_RETURN_IF_ERROR(ToUint32("header.head_end", header.head_end(), &out->head_end));
  SLUICE_RETURN_IF_ERROR(ToUint32("header.token_begin", header.token_begin(), &out->token_begin));
  SLUICE_RETURN_IF_ERROR(ToUint32("header.token_end", header.token_end(), &out->token_end));
  out->crc32c = header.crc32c();
  return absl::OkStatus();
}

absl::Status ReadPayload(CodedInputStream& in, uint64_t message_bytes, const ChunkHeader& header,
                         ChunkSink& sink) {
  uint32_t bytes = 0;
  if (!in.ReadVarint32(&bytes)) return InvalidField("payload", "its length is not readable");
  const uint64_t left = message_bytes - static_cast<uint64_t>(in.CurrentPosition());
  if (bytes > left) {
    return InvalidField(
        "payload", absl::StrCat("is announced with ", bytes, " bytes, but only ", left, " follow"));
  }
  SLUICE_RETURN_IF_ERROR(sink.Begin(header, bytes));
  while (bytes > 0) {
    const void* data = nullptr;
    int size = 0;
    if (!in.GetDirectBufferPointer(&data, &size)) {
      return InvalidField("payload", "the message ends inside it");
    }
    const int take = static_cast<int>(std::min<uint32_t>(bytes, static_cast<uint32_t>(size)));
    sink.Append({static_cast<const uint8_t*>(data), static_cast<size_t>(take)});
    in.Skip(take);
    bytes -= static_cast<uint32_t>(take);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseWriteRequest(google::protobuf::io::ZeroCopyInputStream* message,
                               uint64_t message_bytes, ChunkSink& sink) {
  CodedInputStream in(message);
  ChunkHeader header;
  bool has_header = false;
  bool has_payload = false;
  while (const uint32_t tag = in.ReadTag()) {
    if (tag == Tag(v1::WriteRequest::kHeaderFieldNumber)) {
      if (has_header) return InvalidField("header", "comes twice in one message");
      SLUICE_RETURN_IF_ERROR(ReadHeader(in, &header));
      has_header = true;
    } else if (tag == Tag(v1::WriteRequest::kPayloadFieldNumber)) {
      if (!has_header) return InvalidField("header", "must come before the payload");
      if (has_payload) return InvalidField("payload", "comes twice in one message");
      SLUICE_RETURN_IF_ERROR(ReadPayload(in, message_bytes, header, sink));
      has_payload = true;
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return InvalidField("message", absl::StrCat("is not a WriteRequest: field ", tag >> 3,
                                                  " is malformed or truncated"));
    }
  }
  if (!in.ConsumedEntireMessage()) {
    return InvalidField("message",
                        "is not a WriteRequest: a field's tag is malformed or truncated");
  }
  if (!has_header) return InvalidField("header", "is missing");
  if (!has_payload) return InvalidField("payload", "is missing");
  return absl::OkStatus();
}

}  // namespace sluice
